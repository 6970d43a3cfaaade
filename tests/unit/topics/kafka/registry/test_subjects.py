"""Schemas as a registry holds them: stock readers find our frames in them, and each default identifies its schema."""

import io
import json

import fastavro
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.topics.config import RegistryConfig
from rollstream.topics.kafka.registry.subjects import FRAME_HEADER, registered_text, subject_of, subjects_of
from rollstream.topics.wire.catalogue import CATALOGUE, topic_name
from rollstream.topics.wire.codec import (
    RECORD_TYPES,
    REGISTRY_PREFIX_SIZE,
    Schema,
    encode,
    framed_for_registry,
    record_of,
    schemas,
)
from tests.strategies import any_record

ALL = [schema for versions in schemas().values() for schema in versions]
NAMES = [f"{schema.record}-{schema.version}" for schema in ALL]


@pytest.mark.parametrize("cls", RECORD_TYPES, ids=[cls.__name__ for cls in RECORD_TYPES])
@settings(max_examples=settings().max_examples // 8)
@given(data=st.data())
def test_the_body_behind_an_id_is_a_record_of_the_registered_schema(cls: type, data: st.DataObject) -> None:
    record = data.draw(any_record(cls))
    value = framed_for_registry(encode(record), 9)
    parsed = fastavro.parse_schema(json.loads(registered_text(schemas()[cls.__name__][-1])), named_schemas={})
    stream = io.BytesIO(value[REGISTRY_PREFIX_SIZE:])
    values = fastavro.schemaless_reader(stream, parsed, None)
    assert stream.read() == b""
    assert isinstance(values, dict)
    again = io.BytesIO()
    fastavro.schemaless_writer(again, parsed, values)
    assert again.getvalue() == value[REGISTRY_PREFIX_SIZE:]
    assert encode(record_of(cls, values)) == encode(record)


@pytest.mark.parametrize("schema", ALL, ids=NAMES)
def test_the_default_of_the_first_field_is_the_header_of_our_frames(schema: Schema) -> None:
    text = registered_text(schema)
    header, *fields = json.loads(text)["fields"]
    assert header["name"] == FRAME_HEADER
    assert header["default"].encode("latin-1") == b"\xc3\x01" + schema.fingerprint
    assert header["type"]["size"] == len(header["default"])
    assert fields == schema.source["fields"], "what follows is the packaged schema"
    assert text == registered_text(schema)


def test_every_record_of_every_topic_has_a_subject_of_its_own() -> None:
    config = RegistryConfig(url="http://registry")
    pairs = {(topic_name("main", spec.name), record) for spec in CATALOGUE for record in spec.values}
    subjects = subjects_of(config, "main")
    assert {(subject.topic, subject.record) for subject in subjects} == pairs
    assert len({subject.name for subject in subjects}) == len(pairs)
    for spec in CATALOGUE:
        topic = topic_name("main", spec.name)
        for number, record in enumerate(spec.values):
            subject = subject_of(config, topic, record)
            assert subject is not None
            assert subject.name == (f"{topic}-rollstream.{record}" if number else f"{topic}-value")


def test_subjects_may_be_named_after_records() -> None:
    by_record, by_both = (RegistryConfig(url="u", subjects=names) for names in ("record", "topic-record"))
    evals = subject_of(by_record, "main.evals", "Rollout")
    assert evals is not None
    assert evals.name == "rollstream.Rollout"
    evals = subject_of(by_both, "main.evals", "Rollout")
    assert evals is not None
    assert evals.name == "main.evals-rollstream.Rollout"


@pytest.mark.parametrize(
    ("topic", "record"),
    [
        ("main.weights", "Rollout"),
        ("main.dead-letters", "Rollout"),
        ("main.batches", "Rollout"),
        ("foreign", "Rollout"),
    ],
)
def test_what_the_catalogue_has_not_in_a_topic_has_no_subject(topic: str, record: str) -> None:
    assert subject_of(RegistryConfig(url="u"), topic, record) is None
