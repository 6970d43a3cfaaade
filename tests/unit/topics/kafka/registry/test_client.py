"""A registry behind HTTPS: which clients are let in, and the messages to others.

tests/broker/test_schema_registry.py tests the registry itself.
"""

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fastavro
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.infra.broker.ports import free_port
from rollstream.topics.config import RegistryConfig
from rollstream.topics.errors import RegistryUnavailable, SchemaRefused
from rollstream.topics.kafka.registry.client import (
    FRAME_HEADER,
    RegistryClient,
    registered_text,
    subject_of,
    subjects_of,
)
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
from tests.support.https_front import HttpsFront, https_front

PASSWORD = "a-word-that-nobody-says"


@pytest.fixture
def nobody() -> str:
    """The address of a registry that does not run."""
    return f"http://127.0.0.1:{free_port('127.0.0.1')}/apis/ccompat/v7"


@pytest.fixture
def front(tmp_path: Path, nobody: str) -> Iterator[HttpsFront]:
    with https_front(tmp_path, nobody, "main", PASSWORD) as running:
        yield running


@pytest.fixture
def config(front: HttpsFront, monkeypatch: pytest.MonkeyPatch) -> RegistryConfig:
    monkeypatch.setenv("REGISTRY_PASSWORD", PASSWORD)
    return RegistryConfig(
        url=front.url, username="main", password="env:REGISTRY_PASSWORD", ca=str(front.authority), timeout_s=60.0
    )


def refusal(config: RegistryConfig, error: type[Exception]) -> str:
    """Return the message that a user gets who asks for an id."""
    subject = subject_of(config, "main.rollouts", "Rollout")
    assert subject is not None
    with RegistryClient(config) as client, pytest.raises(error) as raised:
        client.id_of(subject, subject.versions[-1])
    assert PASSWORD not in str(raised.value)
    return str(raised.value)


def test_the_right_user_passes_and_what_lies_behind_is_asked(config: RegistryConfig, front: HttpsFront) -> None:
    assert "502" in refusal(config, RegistryUnavailable)
    assert len(front.passed) == 1
    assert front.refused == []


def test_another_password_is_a_refusal_that_names_the_settings(
    config: RegistryConfig, front: HttpsFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGISTRY_PASSWORD", "another")
    assert "check kafka.registry.username and password" in refusal(config, SchemaRefused)
    assert front.passed == []


def test_a_server_of_an_unknown_authority_is_not_told_the_password(config: RegistryConfig, front: HttpsFront) -> None:
    assert "kafka.registry.ca" in refusal(replace(config, ca=""), RegistryUnavailable)
    assert (front.passed, front.refused) == ([], [])


def test_a_client_without_the_certificate_that_is_asked_for_reads_which_setting_it_lacks(
    config: RegistryConfig, tmp_path: Path, nobody: str
) -> None:
    (tmp_path / "mutual").mkdir()
    with https_front(tmp_path / "mutual", nobody, "main", PASSWORD, clients_have_certificates=True) as front:
        settings = replace(config, url=front.url, ca=str(front.authority))
        assert "kafka.registry.certificate" in refusal(settings, RegistryUnavailable)
        assert front.passed == []
        assert "502" in refusal(replace(settings, certificate=str(front.client)), RegistryUnavailable)
        assert len(front.passed) == 1


def test_a_client_that_is_closed_asks_nothing_more(config: RegistryConfig, front: HttpsFront) -> None:
    subject = subject_of(config, "main.rollouts", "Rollout")
    assert subject is not None
    client = RegistryClient(config)
    client.close()
    with pytest.raises(RegistryUnavailable):
        client.id_of(subject, subject.versions[-1])
    assert front.passed == []


def test_a_mistake_of_ours_is_not_taken_for_a_registry_that_is_down(
    nobody: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RegistryConfig(url=nobody)
    subject = subject_of(config, "main.rollouts", "Rollout")
    assert subject is not None

    def mistaken(_schema: object) -> str:
        raise TypeError("a mistake")

    monkeypatch.setattr("rollstream.topics.kafka.registry.client.registered_text", mistaken)
    with RegistryClient(config) as client, pytest.raises(TypeError, match="a mistake"):
        client.id_of(subject, subject.versions[-1])


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
