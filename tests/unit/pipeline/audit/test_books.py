"""Parts of the ledger's books: a part that is fed in portions, and saved and loaded in between, equals a part that is
fed all at once."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.pipeline.audit.ledger.batch_table import BatchTable
from rollstream.pipeline.audit.ledger.batches import RecordedBatches
from rollstream.pipeline.audit.ledger.book import Ledger
from rollstream.pipeline.audit.ledger.learners import Learners
from rollstream.pipeline.audit.ledger.live import packed, restored, saved, unpacked
from rollstream.pipeline.audit.ledger.trajectories import LABELED, LETTERED, RECORD, UnlabelledPartition
from rollstream.pipeline.audit.offset_table import OffsetTable
from rollstream.pipeline.audit.partition_journal import CARRIED, SEEN, PartitionJournal
from rollstream.pipeline.audit.partition_journal import LETTERED as JOURNAL_LETTERED
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka.records import GroupPosition
from rollstream.topics.records import BatchUse, JournalRecord, LearnerStep
from tests.unit.consumers.grouping.core.test_journal import FULL
from tests.unit.pipeline.audit.test_ledger_steps import entries

OFFSETS = st.integers(0, 40) | st.integers(8_150, 8_220) | st.integers(0, 2**40)
CUTS = st.sets(st.integers(0, 12))


T = TypeVar("T")


def reloaded(part: T) -> T:
    """A part after a round trip through a file."""
    loaded: T = restored(json.loads(json.dumps(saved(part))), KafkaConfig())
    return loaded


# ---------------------------------------------------------------------- offsets


@given(st.lists(st.tuples(OFFSETS, st.integers(1, 90), st.integers(1, 31), st.booleans()), max_size=12))
def test_a_table_of_offsets_holds_what_was_set(changes: list[tuple[int, int, int, bool]]) -> None:
    table, model = OffsetTable(), dict[int, int]()
    for first, count, bits, reload in changes:
        touched = range(first, first + count)
        table.set_bits(first, first + count, bits)
        model |= {offset: model.get(offset, 0) | bits for offset in touched}
        assert [table[offset] for offset in touched] == [model.get(offset, 0) for offset in touched]
        if reload:
            table = reloaded(table)
    held = {offset: value for offset, value in sorted(model.items()) if value}
    runs = table.runs()
    assert list(runs.offsets()) == list(held)
    assert runs.total == len(held)
    assert sum(runs.counts().values()) == len(held)
    odd = runs.where(runs.values & 1 != 0)
    assert [offset for first, last in odd.ranges() for offset in range(first, last + 1)] == [
        offset for offset, value in held.items() if value & 1
    ]


@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_numbers_are_unpacked_as_they_were_packed(numbers: list[int]) -> None:
    assert unpacked(packed(numbers)).tolist() == numbers


def test_settled_history_takes_next_to_nothing() -> None:
    table = OffsetTable()
    table.set_bits(0, 30_000_000, SEEN)
    for offset in range(0, 30_000_000, 3_000):
        table.set_bits_at(offset, JOURNAL_LETTERED)
    assert len(json.dumps(saved(table))) < 30_000_000 / 500


# ---------------------------------------------------------------------- journals


@settings(max_examples=30)
@given(st.lists(FULL, max_size=8), CUTS, st.booleans())
def test_a_journal_read_in_portions_is_the_journal_read_at_once(
    records: list[JournalRecord], cuts: set[int], joined: bool
) -> None:
    if joined:  # As a grouping task writes them.
        records = [replace(record, sequence=n) for n, record in enumerate(records)]
    whole, portions = PartitionJournal(0), PartitionJournal(0)
    for number, record in enumerate(records):
        whole.read(record)
        portions.read(record)
        for journal in (whole, portions):
            journal.table.set_bits(number * 10, number * 20, SEEN | CARRIED)
        if number in cuts:
            for journal in (whole, portions):
                journal.batch_ids.clear()  # The batches take them after each reading.
            portions = reloaded(portions)
    assert saved(portions) == saved(whole)
    assert (portions.since, portions.counts, portions.produced) == (whole.since, whole.counts, whole.produced)


# ---------------------------------------------------------------------- steps

ROWS = 4
USES = st.builds(
    BatchUse,
    batch_id=st.sampled_from(["0-0", "0-1", "0-2", "0-9"]),
    index_offset=st.sampled_from([0, 2, 4, 6]),
    rows=st.sampled_from([ROWS, ROWS, ROWS, 2]),
    use=st.sampled_from(["trained", "skipped"]),
    row_numbers=st.sampled_from([(), (), (0, 1), (2, 3), (0, 9)]),
    again=st.booleans(),
    code=st.sampled_from(["", "old"]),
)
STEPS = st.lists(st.tuples(st.sampled_from("ab"), st.lists(USES, max_size=3), st.integers(0, 9)), max_size=10)


def steps_of(drawn: Sequence[tuple[str, list[BatchUse], int]]) -> list[LearnerStep]:
    return [
        LearnerStep(
            learner=learner,
            step=number,
            input_run="run",
            uses=tuple(uses),
            position=position,
            policy_version=-1,
            params_digest="d",
            trained_total=0,
            skipped_total=0,
        )
        for number, (learner, uses, position) in enumerate(drawn)
    ]


@given(STEPS, CUTS)
def test_steps_taken_in_portions_are_those_taken_at_once(
    drawn: list[tuple[str, list[BatchUse], int]], cuts: set[int]
) -> None:
    steps, table, journal, index = steps_of(drawn), BatchTable(), PartitionJournal(0), entries(0, 2, 4, 6)
    journal.batches = 4
    for number in range(3):
        table.found(0, number, (0, number), ROWS)

    def judged(learners: Learners) -> Ledger:
        book = Ledger()
        learners.check(table, {}, {0: journal}, index, 8, book)
        return book

    whole, portions = Learners(KafkaConfig(), "run"), Learners(KafkaConfig(), "run")
    whole.take(sorted(steps, key=lambda step: (step.learner, step.step)))
    begin = 0
    for cut in (*sorted(cut for cut in cuts if cut < len(steps)), len(steps)):
        portions.take(sorted(steps[begin:cut], key=lambda step: (step.learner, step.step)))
        begin = cut
        judged(portions)
        portions = reloaded(portions)
    assert judged(portions) == judged(whole)
    assert [portions.untrained(f"0-{n}") for n in range(4)] == [whole.untrained(f"0-{n}") for n in range(4)]


def test_batches_and_entries_are_loaded_as_they_were_saved() -> None:
    table, index = BatchTable(), entries(0, 2, 4)
    for number in (7, 5, 9):
        table.expect(1, number)
        table.found(1, number, (0, number + 1), ROWS)
        table.enter(1, number, number + 2)
    table.expect(1, 8)
    loaded, named = reloaded(table), reloaded(index)
    assert (loaded.missing(), loaded.place(1, 7), loaded.rows("1-9"), loaded.entry(1, 5)) == (["1-8"], (0, 8), ROWS, 7)
    assert loaded.unnamed(1, 5, 10) == table.unnamed(1, 5, 10) == [6, 8]
    assert saved(loaded) == saved(table)
    assert (list(named.between(0, 3)), named.batch_at(4), named.from_offset(1)) == ([(0, "0-0"), (2, "0-1")], "0-2", 2)


def test_batches_that_were_trained_on_whole_are_not_read_again() -> None:
    """Each batch would be fetched by itself, so a live ledger of thousands of steps would never finish."""
    nowhere = RecordedBatches(KafkaConfig(bootstrap_servers="127.0.0.1:9"), "main")
    nowhere.table.found(0, 7, (0, 12), rows=4)
    nowhere.measure_again({"0-7"}, lambda _batch_id: set())
    assert nowhere.skipped == {}


# ---------------------------------------------------------------------- labels

FACTS = st.lists(st.tuples(st.sampled_from([RECORD, RECORD, LABELED, LETTERED]), st.integers(0, 30)), max_size=40)


@given(FACTS, CUTS, st.integers(-1, 32), st.integers(0, 32), st.integers(0, 32))
def test_labels_counted_in_portions_give_each_offset_the_fate_that_sets_give_it(
    facts: list[tuple[int, int]], cuts: set[int], position: int, since: int, begin: int
) -> None:
    part, named = UnlabelledPartition(), {RECORD: Counter[int](), LABELED: Counter[int](), LETTERED: Counter[int]()}
    for number, (fact, offset) in enumerate(facts):
        named[fact][offset] += 1
        if fact == RECORD:
            part.table.set_bits_at(offset, RECORD)
        else:
            part.count(offset, fact)
        if number in cuts:
            part = reloaded(part)
    part.place(begin, GroupPosition("run.unlabelled", 0, position, f"id {since} 0 0 0 0"))
    part.judge()
    limit = 100 if position < 0 else position
    labeled, lettered = ({o for o in named[fact] if o < limit} for fact in (LABELED, LETTERED))
    left = {o for o in named[RECORD] if begin <= o < max(position, 0)} - named[LABELED].keys() - named[LETTERED].keys()
    fates = {fate: set(part.of_fate(fate).offsets()) for fate in ("labeled", "dead_lettered", "left_out")}
    assert fates == {"labeled": labeled, "dead_lettered": lettered, "left_out": left}
    assert list(part.records(5, 20).offsets()) == sorted(o for o in named[RECORD] if max(5, begin) <= o < 20)
    twice = {o for fact in (LABELED, LETTERED) for o, times in named[fact].items() if times > 1 and o < limit}
    assert {int(text.split()[1]) for text in part.problems() if text.endswith(" times")} == twice
