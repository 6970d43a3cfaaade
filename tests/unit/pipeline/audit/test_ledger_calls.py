"""The ledger's book of calls: each call has one fate."""

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rollstream.consumers.grouping.testing import example_rollout
from rollstream.pipeline.audit.ledger.book import Ledger
from rollstream.pipeline.audit.ledger.calls import FATES, CallBook, CallRecords
from rollstream.pipeline.tools.ledger import calls_text
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.records import ModelCall, SessionEvent
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from tests.simulation.installation import World
from tests.simulation.partition_log import Entry
from tests.support.modelled_run import KAFKA, RUN, ModelledRun
from tests.unit.producers.gateway.test_sessions import START, call, event

RECORDS = st.lists(
    st.sampled_from(["start", "reward", "end", "failed", "mark", "finished", "cancelled", "call", "again", "unfit"]),
    max_size=12,
)


def record(kind: str, number: int, session: str) -> ModelCall | SessionEvent:
    if kind == "start":
        return replace(START, session=session)
    if kind in ("call", "again", "unfit"):
        made = call(number, request="r" if kind == "again" else f"r{number}", session=session)
        return replace(made, prompt_digest="other") if kind == "unfit" else made
    uids = (session,) if kind == "finished" else ()
    name = "finished" if kind == "cancelled" else kind
    return event(name, session=session, scored=kind == "reward", uids=uids, reason="why" if kind == "cancelled" else "")


@given(RECORDS)
def test_every_call_has_exactly_one_fate(kinds: list[str]) -> None:
    book = CallBook()
    for offset, kind in enumerate(kinds):
        made = record(kind, offset, f"g.{offset % 2}")
        book.add(KafkaRecord("x.calls", 0, offset, timestamp_ms=offset * 40), made)
    fates = book.fates()
    assert fates.total() == book.calls == sum(kind in ("call", "again", "unfit") for kind in kinds)
    assert set(fates) <= set(FATES)
    assert Ledger(calls={"recorded": book.calls, **{fate: fates[fate] for fate in FATES}}).balanced


def test_calls_whose_start_was_pruned_are_not_dropped_calls() -> None:
    book = CallBook()
    for partition in (0, 1):
        book.add(KafkaRecord("x.calls", partition, 5, timestamp_ms=0), record("call", 0, f"g.{partition}"))
    fates = book.fates({0: 5, 1: 0})
    assert (fates["pruned"], fates["no_session"]) == (1, 1)
    assert Ledger(calls={"recorded": book.calls, **{fate: fates[fate] for fate in FATES}}).balanced


def test_a_call_without_a_fate_unbalances_the_ledger() -> None:
    assert not Ledger(calls={"recorded": 2, "open": 1}).balanced


def test_people_read_fates_and_reasons() -> None:
    calls = dict.fromkeys(FATES, 0) | {"recorded": 5, "in_rollouts": 3, "retried": 2}
    text = calls_text({**calls, "sessions": 2, "open_sessions": 0, "reasons": {"no model call was made": 1}})
    assert "in rollouts" in text
    assert "dropped: retried" in text
    assert "cancelled: no model call was made" in text
    assert "late" not in text


def test_a_session_that_begins_and_ends_between_the_readings_of_calls_and_rollouts_is_not_accused(
    world: World,
) -> None:
    run, session = ModelledRun(world), "g.1"

    def write(kind: str, name: str) -> None:
        run.write("calls", encode_key("env", name), encode(record(kind, 0, name)))

    write("start", "g.0")  # It is open, so the rollouts are read, too.
    log = run.log("rollouts")
    visible = log.visible

    def live_first(*words: Any) -> tuple[list[Entry], int]:
        log.visible = visible  # type: ignore[method-assign]
        write("start", session)
        run.write("rollouts", encode_key("env", session), encode(example_rollout(session)))
        write("finished", session)
        return visible(*words)

    records = CallRecords(KAFKA, RUN)
    log.visible = live_first  # type: ignore[method-assign]
    for _ in range(3):
        ends, book = {0: log.end}, Ledger()
        world.result_of(lambda ends=ends: records.read(ends))
        world.result_of(lambda book=book: records.sum_up(book))
        assert book.problems == []
    assert book.calls["sessions"] == 2
