"""Outstanding rollouts by environment: from counts of the journal, in whatever portions they come."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rollstream.producers.flow.environment_counts import EnvironmentCounts
from rollstream.topics.records import FateCount
from rollstream.topics.records.journal import JournalCounts


class Journal(JournalCounts):
    """Counts of one partition, set directly."""

    def __init__(self, produced: dict[str, int], fates: dict[tuple[str, str], int]) -> None:
        super().__init__()
        self._entries = produced, fates

    @property
    def counts(self) -> tuple[FateCount, ...]:
        return tuple(
            FateCount(environment=environment, fate=fate, rollouts=n, tokens=0)
            for (environment, fate), n in self._entries[1].items()
        )

    @property
    def produced(self) -> tuple[FateCount, ...]:
        return tuple(
            FateCount(environment=environment, fate="read", rollouts=n, tokens=0)
            for environment, n in self._entries[0].items()
        )


def test_what_is_held_and_what_waits_counts_and_what_is_dropped_or_consumed_does_not() -> None:
    counts = EnvironmentCounts()
    counts.add(0, Journal({}, {}))
    counts.add(0, Journal({"a": 20, "b": 10}, {("a", "batched"): 8, ("a", "dropped:stale_version"): 4}))
    counts.add(0, Journal({"a": 20, "b": 10, "": 2}, {("a", "batched"): 8, ("b", "batched"): 8, ("", "control"): 1}))
    assert counts.outstanding(0) == {"": 2, "a": 20, "b": 10}
    assert counts.outstanding(8) == {"": 2, "a": 12, "b": 10}
    assert counts.outstanding(12) == {"": 2, "a": 12, "b": 6}
    assert counts.outstanding(99) == {"": 2, "a": 12, "b": 2}


def test_what_waited_before_the_first_look_is_split_like_all_that_was_batched() -> None:
    counts = EnvironmentCounts()
    counts.add(0, Journal({"a": 300, "b": 100}, {("a", "batched"): 300, ("b", "batched"): 100}))
    assert counts.outstanding(360) == {"a": 30, "b": 10}
    counts.add(0, Journal({"a": 300, "b": 120}, {("a", "batched"): 300, ("b", "batched"): 120}))
    assert counts.outstanding(400) == {"a": 0, "b": 20}, "the newest wait"


batches = st.lists(st.tuples(st.integers(0, 2), st.dictionaries(st.sampled_from("ab"), st.integers(1, 9))), max_size=30)


@given(batches, st.data())
def test_batches_taken_in_order_leave_what_was_batched_last(
    cut: list[tuple[int, dict[str, int]]], data: st.DataObject
) -> None:
    """The counts are exact where a record of the journal cuts one batch of one environment."""
    counts, totals = EnvironmentCounts(), [Counter[str]() for _ in range(3)]
    for partition in range(3):
        counts.add(partition, Journal({}, {}))
    order: list[tuple[str, int]] = []
    for partition, batch in cut:
        for environment, rollouts in batch.items():
            order.append((environment, rollouts))
            totals[partition][environment] += rollouts
            batched = {(name, "batched"): n for name, n in totals[partition].items()}
            counts.add(partition, Journal(dict(totals[partition]), batched))
    taken = data.draw(st.integers(0, len(order)))
    left = Counter[str]()
    for environment, rollouts in order[taken:]:
        left[environment] += rollouts
    seen = counts.outstanding(sum(rollouts for _environment, rollouts in order[:taken]))
    assert +Counter(seen) == left
