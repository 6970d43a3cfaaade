"""Transactional ids: no two writers share one, and the prefix of a run covers that run alone."""

from hypothesis import given
from hypothesis import strategies as st

from rollstream.topics.kafka.transactional_ids import transactional_id

RUNS = st.text("ab0._-", min_size=1, max_size=6)
ROLES = st.sampled_from(["grouper", "labeller", "learner", "exclude", "redrive", "migrate", "restore"])
WHICH = st.one_of(st.just(""), st.integers(0, 12), st.just("bootstrap"))
WRITERS = st.tuples(RUNS, ROLES, WHICH)


@given(WRITERS, WRITERS)
def test_different_writers_have_different_ids(
    one: tuple[str, str, str | int], other: tuple[str, str, str | int]
) -> None:
    assert (transactional_id(*one) == transactional_id(*other)) == (one == other)
    assert (one[0] == other[0]) == transactional_id(*one).startswith(f"{other[0]}/")
