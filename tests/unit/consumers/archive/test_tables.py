"""The rows of tables, against the records that `codec.decode` makes of the same bytes."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.consumers.archive import tables, writer
from rollstream.consumers.archive.tables import SCHEMAS, ArchivedRecord, log_table, rows_of, table_of
from rollstream.consumers.grouping.testing import example_rollout
from rollstream.topics.errors import RecordError
from rollstream.topics.records import (
    Drop,
    FinishedGroup,
    JournalRecord,
    LearnerStep,
    RescoredRollout,
    Rollout,
    TokenizerPart,
)
from rollstream.topics.wire.codec import decode, encode
from tests.strategies import any_record
from tests.support.archiving import DAY_MS, StoppingStore, entry
from tests.support.batches import random_batch
from tests.support.journal_records import journal_record

PLACE = {"topic": "rollouts", "partition": 3, "offset": 7, "timestamp_ms": DAY_MS}
FILE = {"run": "main", "date": "1970-01-02"}


def expected_rows(r: Rollout, arrays: bool) -> dict[str, list[dict[str, Any]]]:
    """The rows of a rollout by table, each value as the record has it."""
    about, sampling, names = vars(r.metadata), vars(r.sampling), SCHEMAS["rollouts"].names
    same = {**FILE, **PLACE, "environment": r.environment}
    made = {
        "reward_components": pairs(r.reward_components),
        "extra": pairs(r.extra),
        "length": len(r.tokens),
        "sampled": len(r.tokens) - r.loss_mask.tolist().count(False),
        "turns": len(r.turns),
        "created_s": r.metadata.timestamp,
        **{name: getattr(r, name).tolist() if arrays else None for name in ("tokens", "loss_mask", "logprobs")},
    }
    turns = [
        {
            **vars(turn), **vars(turn.inference), "uid": r.uid, "example_id": r.example_id,
            "policy_version": r.policy_version, "turn": number, "created_s": turn.timestamp,
            "sampling_params": pairs(turn.inference.sampling_params),
        }
        for number, turn in enumerate(r.turns)
    ]  # fmt: skip
    values = {**vars(r), **about, **sampling, **made, **same}
    return {
        "rollouts": [{name: values[name] for name in names}],
        "turns": [{name: (turn | same)[name] for name in SCHEMAS["turns"].names} for turn in turns],
    }


def pairs(entries: Mapping[str, object]) -> list[dict[str, object]]:
    return [{"key": key, "value": value} for key, value in entries.items()]


def actual_rows(sent: ArchivedRecord, arrays: bool) -> dict[str, list[dict[str, Any]]]:
    """The rows of a record of `rollouts`, by table."""
    rows = list(rows_of(sent, arrays=arrays))
    return {
        name: table_of(name, "main", FILE["date"], [row for table, row in rows if table == name]).to_pylist()
        for name in ("rollouts", "turns")
    }


@settings(max_examples=60)
@given(
    record=any_record(Rollout),
    changes=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=2),
    arrays=st.booleans(),
)
def test_a_rollout_has_the_rows_of_the_decoded_record_or_is_refused_as_it_is(
    record: Rollout, changes: list[tuple[float, int]], arrays: bool
) -> None:
    """Half of the records are damaged in one byte or two."""
    value = bytearray(encode(record))
    for place, byte in changes:
        value[int(place * (len(value) - 1))] = byte
    sent = ArchivedRecord("rollouts", 3, 7, DAY_MS, b"key", bytes(value))
    assert outcome(lambda: actual_rows(sent, arrays)) == outcome(lambda: expected_rows(decode(bytes(value)), arrays))


def test_a_rollout_that_another_encoder_wrote_has_the_same_rows() -> None:
    """Avro permits the size of a block after its count, which is then negative."""
    value, entries = encode(example_rollout("a", extra={"a": "b"})), b"\x02a\x02b\x00"
    assert value.endswith(b"\x02" + entries)
    foreign = value[: -len(entries) - 1] + b"\x01\x08" + entries
    ours, theirs = (list(rows_of(ArchivedRecord("rollouts", 0, 0, 0, b"", v), arrays=False)) for v in (value, foreign))
    assert repr(theirs) == repr(ours)


def outcome(make: Callable[[], dict[str, list[dict[str, Any]]]]) -> str:
    """The text of the rows, in which NaN equals NaN, or that there are none."""
    try:
        rows = make()
    except RecordError:
        return "refused"
    numbers = [row[name] for table in rows for name in tables.INT32_COLUMNS[table] for row in rows[table]]
    return repr(rows) if all(-(2**31) <= number < 2**31 for number in numbers) else "refused"


@pytest.mark.parametrize("array", ["loss_mask", "tokens", "logprobs", "token_rewards"])
@pytest.mark.parametrize("topic", ["rollouts", "unlabelled"])
def test_an_array_that_is_none_is_refused_although_no_column_shows_it(array: str, topic: str) -> None:
    """Bytes of a mask are 0 or 1, and the other arrays have four bytes an element."""
    empty = {"tokens": b"", "loss_mask": b"", "logprobs": b"", "token_rewards": b""}
    damaged: Any = rollout_of(**empty | {array: b"\2"})
    with pytest.raises(RecordError) as error:
        decode(encode(damaged))
    with pytest.raises(RecordError) as refused:
        list(rows_of(ArchivedRecord(topic, 0, 0, 0, None, encode(damaged)), arrays=False))
    assert str(refused.value) == str(error.value)


def rollout_of(**changes: Any) -> Rollout:
    """A rollout with any values; the codec writes bytes in place of an array as they are."""
    values: dict[str, Any] = {"uid": "u", "environment": "env", "example_id": "x", "reward": 0.0}
    numbers = dict.fromkeys(("group_size", "policy_version", "lowest_version", "highest_version"), 1)
    return Rollout(**values | numbers | changes)


def test_every_column_of_the_other_tables_has_a_value() -> None:
    """A missing key would become null."""
    group = FinishedGroup(
        environment="env", example_id="x", policy_version=1, group_id="g", sealed_ms=2, finished_ms=3
    )  # fmt: skip
    step = {"learner": "main", "step": 1, "input_run": "main", "position": 1, "policy_version": 2}
    totals = {"params_digest": "d", "trained_total": 4, "skipped_total": 0, "uses": ()}
    rescored = RescoredRollout(
        rescoring="r", verifier="v", verifier_digest="d", partition=9, offset=5, uid="u", environment="env",
        reward_before=1.0, reward=2.0, components={"a": 1.0},
    )  # fmt: skip
    drop = Drop(offset=5, reason="late", environment="env")
    records: dict[str, object] = {
        "batches": random_batch(0, rows=4),
        "journal": journal_record(drops=(drop,), finished_groups=(group,)),
        "steps": LearnerStep(**step, **totals),  # type: ignore[arg-type]
        "rescores": rescored,
        "tokenizers": TokenizerPart(digest="d", part=0, parts=1, first_id=2, texts=("a", " ")),
    }
    empty = {("rescores", "failure")}
    for topic, record in records.items():
        sent = ArchivedRecord(topic, 3, 7, DAY_MS, None, encode(record))
        for table, row in rows_of(sent, arrays=True):
            [shown] = table_of(table, "main", FILE["date"], [row]).to_pylist()
            assert {(table, name) for name, value in shown.items() if value is None} <= empty
            assert shown | PLACE | {"topic": topic} == shown, "the place is the record's, not one that it names"
            assert shown.get("rollout_offset", 5) == 5


def test_a_journal_without_drops_has_no_row() -> None:
    record: JournalRecord = journal_record()
    assert not list(rows_of(ArchivedRecord("journal", 0, 0, 0, None, encode(record)), arrays=False))


@pytest.mark.parametrize("size", [10, 10_000])
def test_the_log_has_the_bytes_of_every_record(size: int) -> None:
    """Large values are not copied."""
    values = [
        b"a" * size,
        None,
        b"",
        encode(rollout_of(tokens=b"", loss_mask=b"", logprobs=b"")),
        b"b" * size,
        b"c" * size,
    ]
    headers = [None, (("name", b"1"), ("name", None)), None, (), None, None]
    entries = [
        ArchivedRecord("rollouts", 3, offset, DAY_MS + offset, None if offset == 2 else b"k", value, pairs_of_header)
        for offset, (value, pairs_of_header) in enumerate(zip(values, headers, strict=True))
    ]
    table = log_table("main", entries)
    assert table["value"].num_chunks == (1 if size < tables.LARGE_VALUE_BYTES else len(values))
    rows = table.to_pylist()
    assert [row["value"] for row in rows] == values
    assert [row["kind"] for row in rows] == [None, None, None, "Rollout", None, None]
    named = [None if row["headers"] is None else tuple(tuple(h.values()) for h in row["headers"]) for row in rows]
    assert named == headers
    for row, sent in zip(rows, entries, strict=True):
        assert (row["offset"], row["timestamp_ms"], row["key"]) == (sent.offset, sent.timestamp_ms, sent.key)
        assert (row["run"], row["environment"], row["date"]) == ("main", "", "1970-01-02")


@pytest.mark.parametrize("at_once", [3, 100])
def test_rows_are_made_of_so_many_records_at_once_and_none_is_left_out(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(writer, "CONVERTED_AT_ONCE", at_once)
    store = StoppingStore()
    archive = writer.ArchiveWriter(store, "main")
    archive.begin("rollouts", "id", {0: 0})
    for offset in range(16):
        archive.add(entry(0, offset, timestamp_ms=DAY_MS * (1 + offset // 8)))
        if offset in (4, 15):
            archive.commit({("rollouts", 0): offset + 1})
    archive.close()
    rows = [row for file in archive.manifest.files_of("rollouts") for row in writer.read_table(store, file).to_pylist()]
    assert sorted(row["offset"] for row in rows) == list(range(16))
    for file in archive.manifest.files_of("rollouts"):
        offsets = [row["offset"] for row in writer.read_table(store, file).to_pylist()]
        assert (file.first, file.last, file.rows) == (offsets[0], offsets[-1], len(offsets))
        assert offsets == sorted(offsets)
