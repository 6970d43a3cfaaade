"""Container files: rollouts come back as they were, and damage costs no more than what it hit."""

import io
import pickle
from typing import Any

import fastavro
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.topics.errors import RecordError
from rollstream.topics.records import Rollout, same
from rollstream.topics.wire.avro_files import (
    ContainerDamage,
    ContainerRecord,
    container_metadata,
    read_container,
    read_rollouts,
    write_rollouts,
)
from tests.strategies import rollouts

SCHEMA = {"type": "record", "name": "R", "fields": [{"name": "n", "type": "long"}, {"name": "text", "type": "string"}]}


def container(count: int, codec: str = "null") -> bytes:
    """Records 0 to `count` - 1, two per block."""
    out = io.BytesIO()
    rows = ({"n": n, "text": f"record {n}"} for n in range(count))
    fastavro.writer(out, SCHEMA, rows, codec=codec, sync_interval=20, sync_marker=b"0123456789abcdef")
    return out.getvalue()


def numbers(data: bytes) -> list[int]:
    return [item.values["n"] for item in read_container(data) if isinstance(item, ContainerRecord)]


def damage(data: bytes) -> list[ContainerDamage]:
    return [item for item in read_container(data) if isinstance(item, ContainerDamage)]


@settings(max_examples=settings().max_examples // 4)
@given(st.lists(rollouts(), max_size=4))
def test_rollouts_come_back_as_they_were(written: list[Rollout]) -> None:
    out = io.BytesIO()
    write_rollouts(out, written, {"rollstream.source": "here"})
    assert container_metadata(out.getvalue())["rollstream.source"] == b"here"
    assert all(map(same, read_rollouts(out.getvalue()), written))


@pytest.mark.parametrize("codec", ["null", "deflate"])
def test_every_record_has_a_place_of_its_own(codec: str) -> None:
    actual = list(read_container(container(7, codec)))
    assert [item.values["n"] for item in actual if isinstance(item, ContainerRecord)] == list(range(7))
    assert len({item.place for item in actual}) == 7


def test_a_damaged_block_costs_its_own_records_alone() -> None:
    whole = container(8)
    at = whole.index(b"record 4")
    for damaged in (
        whole[: at - 3] + b"\xff\xff\xff" + whole[at:],
        whole[: at + 3] + b"\xff\xfe" + whole[at + 5 :],
        whole[: at + 3] + whole[at + 5 :],
    ):
        assert {0, 1, 6, 7} <= set(numbers(damaged)) <= {0, 1, 2, 3, 5, 6, 7}
        assert len(damage(damaged)) == 1
    for cut in range(whole.index(b"record 7") - 2, len(whole)):
        assert numbers(whole[:cut])[:6] == [0, 1, 2, 3, 4, 5]
        assert len(damage(whole[:cut])) == 1


@given(st.integers(0, 400), st.binary(min_size=1, max_size=8))
def test_no_bytes_anywhere_end_in_anything_but_records_and_damage(at: int, junk: bytes) -> None:
    whole = container(6)
    for damaged in (whole[:at] + junk + whole[at:], whole[:at] + junk + whole[at + len(junk) :], whole[:at], junk):
        for item in read_container(damaged):
            assert isinstance(item, ContainerRecord | ContainerDamage)


def test_a_block_that_cannot_be_unpacked_loses_no_more_records_than_it_has_bytes() -> None:
    whole = container(2, "deflate")
    header = whole[: whole.index(b"0123456789abcdef") + 16]
    out = io.BytesIO()
    fastavro.schemaless_writer(out, "long", 2**62)
    fastavro.schemaless_writer(out, "bytes", b"not deflated")
    [lost] = damage(header + out.getvalue() + b"0123456789abcdef")
    assert 1 <= lost.records <= len(b"not deflated")


@pytest.mark.parametrize("data", [b"", b"Obj\x01", pickle.dumps([1]), b"\x00" * 100])
def test_bytes_that_are_no_container_are_damage_and_are_never_executed(data: bytes) -> None:
    [only] = read_container(data)
    assert isinstance(only, ContainerDamage)
    assert only.place == "header"
    with pytest.raises(RecordError):
        container_metadata(data)


@pytest.mark.parametrize("values", [{"n": 1, "text": "x"}])
def test_a_container_of_something_else_is_no_file_of_rollouts(values: Any) -> None:
    with pytest.raises(RecordError, match="not a Rollout"):
        read_rollouts(container(1))
    with pytest.raises(RecordError, match="damaged at header"):
        read_rollouts(b"")
