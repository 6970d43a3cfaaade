"""An index of places reads from undecoded records what decoding would give."""

import contextlib
import itertools
import json
from importlib import resources

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.consumers.grouping.testing import example_rollout
from rollstream.pipeline.audit.place_index import finished_spans, portions
from rollstream.topics.codec import decode, encode, framed_for_registry, leading_text, schemas
from rollstream.topics.errors import RecordError
from rollstream.topics.fates import BATCHED, CONTROL, DROPPED
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.offset_ranges import to_ranges
from rollstream.topics.records import FinishedOffsets


def test_every_schema_of_a_rollout_begins_with_its_uid() -> None:
    folder = resources.files("rollstream.topics").joinpath("schemas")
    for schema in schemas()["Rollout"]:
        source = json.loads(folder.joinpath(f"rollout.v{schema.version}.avsc").read_text(encoding="utf-8"))
        assert (source["fields"][0]["name"], source["fields"][0]["type"]) == ("uid", "string")


@given(st.text(max_size=300), st.booleans())
def test_the_leading_text_of_a_rollout_is_its_uid(uid: str, in_registry: bool) -> None:
    value = encode(example_rollout(uid, 1.0, tokens=np.arange(3, dtype="<i4")))
    if in_registry:
        value = framed_for_registry(value, 7)
    assert leading_text(value).decode() == decode(value).uid == uid


@given(st.binary(max_size=40))
def test_a_frame_that_ends_early_is_refused_and_other_bytes_end_no_reader(rest: bytes) -> None:
    frame = encode(example_rollout("a name", 1.0))[:10]
    with contextlib.suppress(RecordError):
        assert leading_text(frame + rest) in rest
    for cut in range(10, 10 + 1 + len("a name")):
        with pytest.raises(RecordError, match="ends within its first field"):
            leading_text(encode(example_rollout("a name", 1.0))[:cut])


@given(st.dictionaries(st.integers(0, 60), st.sampled_from([BATCHED, CONTROL, DROPPED])))
def test_spans_hold_each_finished_offset_once_whatever_its_fate(fates: dict[int, str]) -> None:
    finished = [
        FinishedOffsets(fate=fate, runs=to_ranges(offset for offset, its in fates.items() if its == fate))
        for fate in sorted(set(fates.values()))
    ]
    spans = finished_spans(finished)
    assert [offset for first, last in spans for offset in range(first, last + 1)] == sorted(fates)
    assert all(last + 1 < first for (_, last), (first, _) in itertools.pairwise(spans))


def test_a_portion_counts_all_bytes_of_the_records_that_it_holds() -> None:
    large = b"v" * 24 * 1024 * 1024
    messages = [KafkaRecord("main.rollouts", 0, n, 0, large, None, (("name", large),)) for n in range(4)]
    assert [len(portion) for portion in portions(messages, 100)] == [2, 2]
