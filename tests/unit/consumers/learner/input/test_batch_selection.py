"""Batches that make a step: whole batches in index order, with stale ones on record, independent of the clock."""

import itertools
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.consumers.batch_reader import IndexedBatch
from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.input.batch_selection import (
    BatchSelection,
    StepPlan,
    share_of,
    totals_of,
    unfit_uses,
)
from rollstream.topics.records import BatchIndexEntry, BatchUse
from rollstream.topics.records.fates import UNKNOWN_VERSION, Skip
from rollstream.topics.records.learner import left_out_rows, rows_of, taken_rows, without
from tests.support.batches import random_batch

ENTRY = BatchIndexEntry(
    batch_id="0-0",
    partition=0,
    offset=0,
    rollouts=16,
    tokens=1,
    trained_tokens=1,
    lowest_version=0,
    highest_version=0,
    size_bytes=1,
    digest="",
)


class ScriptedReader:
    """Returns the batches of a list, None where the list has None, and then sets `stop`."""

    apart = 10
    """Difference between the index offsets of two batches."""

    def __init__(self, versions: list[int | None], stop: threading.Event) -> None:
        self._script = list(enumerate(versions))
        self._stop = stop
        self.position = 0

    def poll(self, timeout_s: float) -> IndexedBatch | None:
        if not self._script:
            self._stop.set()
            return None
        number, version = self._script.pop(0)
        if version is None:
            return None
        batch = random_batch(number, version=version)
        entry = BatchIndexEntry(
            batch_id=batch.batch_id,
            partition=0,
            offset=number,
            rollouts=len(batch),
            tokens=len(batch.tokens),
            trained_tokens=int(batch.loss_mask.sum()),
            lowest_version=version,
            highest_version=version,
            size_bytes=1,
            digest=batch.digest,
        )
        self.position = self.apart * number + 1
        return IndexedBatch(entry, self.apart * number)


def take(
    versions: list[int | None], step: int = 0, steps_of_versions: dict[int, int] | None = None, **more: Any
) -> tuple[StepPlan | None, list[tuple[BatchUse, ...]]]:
    """A step of at least 40 rollouts, from batches of 16, with a lag of 2 allowed; and the skips reported meanwhile."""
    stop, reported = threading.Event(), []
    selection = BatchSelection(
        ScriptedReader(versions, stop),  # type: ignore[arg-type]
        rollouts_per_step=40,
        max_policy_lag=2,
        read_version_steps=lambda _version: steps_of_versions or {0: 0},
        skipped=reported.append,
        **more,
    )
    return selection.plan(step, stop), reported


def test_a_step_takes_whole_batches_until_it_has_enough() -> None:
    plan, _ = take([0, 0, None, 0, 0])
    assert plan is not None
    assert [(use.index_offset, use.rows, use.use) for use in plan.uses] == [
        (0, 16, "trained"),
        (10, 16, "trained"),
        (30, 16, "trained"),
    ]
    assert plan.position == 31
    assert rows_of(plan.uses, "trained") == 48


@pytest.mark.parametrize(("step", "use"), [(2, "trained"), (3, "skipped")])
def test_a_batch_is_too_old_when_its_version_was_published_more_steps_ago_than_allowed(step: int, use: str) -> None:
    plan, _ = take([7, 8, 8, 8], step=step, steps_of_versions={7: 0, 8: step})
    assert plan is not None
    assert plan.uses[0].use == use
    assert (plan.uses[0].reason == "") == (use == "trained")
    assert [use.use for use in plan.uses[1:]] == ["trained"] * (len(plan.uses) - 1)
    assert plan.lags == ((2, 0, 0) if use == "trained" else (0, 0, 0))


def test_batches_of_another_runs_learner_age_by_its_steps_on_record_whatever_our_own_step_is() -> None:
    completed = {0: 2, 10: 2, 20: 3, 30: 3}
    for step in (0, 10_000):
        plan, _ = take([0, 1, 0, 1], step, {0: 0, 1: 1}, publisher_step=completed.get)
        assert plan is not None
        assert [use.use for use in plan.uses] == ["trained", "trained", "skipped", "trained"]
        assert plan.uses[2].reason == "policy version 0 is 3 steps old, max_policy_lag is 2"
        assert plan.lags == (2, 1, 2)


def test_without_steps_on_record_batches_of_another_run_age_by_the_newest_version_in_it() -> None:
    published_after = {0: 0, 1: 1, 8: 7, 9: 9}
    for step in (0, 10_000):
        plan, _ = take([0, 9, 1, 8], step, published_after, publisher_step=lambda _offset: None)
        assert plan is not None
        assert [use.use for use in plan.uses] == ["trained", "trained", "skipped", "trained"]
        assert plan.uses[2].reason == "policy version 1 is 8 steps old, max_policy_lag is 2"
        assert plan.lags == (0, 0, 2)


def test_batches_of_an_earlier_learner_age_by_its_steps_until_it_was_replaced_and_by_ours_since() -> None:
    # The learner was replaced after its step 100, and this learner's first own version is 101.
    steps_of_versions = {97: -3, 98: -2, 99: -1, 100: 0, 101: 0}
    plan, _ = take([97, 98, 100, 101], 0, steps_of_versions)
    assert plan is not None
    assert plan.uses[0].reason == "policy version 97 is 3 steps old, max_policy_lag is 2"
    assert plan.lags == (2, 0, 0)
    plan, _ = take([98, 99, 100, 101, 101], 2, steps_of_versions)
    assert plan is not None
    assert [use.use for use in plan.uses] == ["skipped", "skipped", "trained", "trained", "trained"]


def test_an_excluded_batch_is_skipped_whatever_its_version_and_replaced() -> None:
    stop, request = threading.Event(), []

    def excluded(batch_id: str) -> str:
        request.append(batch_id)
        return "excluded: worker w" if batch_id in ("0-1", "0-2") else ""

    selection = BatchSelection(
        ScriptedReader([0, 0, 9, 0, 0], stop),  # type: ignore[arg-type]
        rollouts_per_step=40,
        max_policy_lag=2,
        read_version_steps=lambda _version: {0: 0},
        skipped=lambda _uses: None,
        excluded=excluded,
    )
    plan = selection.plan(2, stop)
    assert plan is not None
    reasons = [(use.batch_id, use.use, use.reason) for use in plan.uses]
    why = "excluded: worker w"
    assert reasons[:3] == [("0-0", "trained", ""), ("0-1", "skipped", why), ("0-2", "skipped", why)]
    assert [use.use for use in plan.uses[3:]] == ["trained", "trained"]
    assert request == [f"0-{number}" for number in range(5)]


def test_a_step_on_record_takes_what_it_took_whatever_was_excluded_or_published_since() -> None:
    stop = threading.Event()

    def recorded(number: int, skip: Skip | None, rows: int, *row_numbers: int) -> BatchUse:
        return BatchUse(
            batch_id=f"0-{number}",
            index_offset=10 * number,
            rows=rows,
            use="skipped" if skip else "trained",
            reason=skip.reason if skip else "",
            row_numbers=row_numbers,
            code=skip.code if skip else "",
        )

    part, whole = Skip("vocabulary", "left out as vocabulary: x"), Skip("advantage", "left out as advantage: y")
    on_record = {
        "0-0": (recorded(0, Skip(UNKNOWN_VERSION, "policy version 0 is not on record"), 16),),
        "0-1": (recorded(1, None, 15, *range(15)), recorded(1, part, 1, 15)),
        "0-2": (recorded(2, whole, 16),),
        "0-3": (recorded(3, None, 16),),
    }
    selection = BatchSelection(
        ScriptedReader([0, 0, 0, 0, 0], stop),  # type: ignore[arg-type]
        rollouts_per_step=40,
        max_policy_lag=2,
        read_version_steps=lambda _version: {0: 0},
        skipped=lambda _uses: None,
        decided=lambda step, batch_id: on_record.get(batch_id, ()) if step == 1 else (),
        excluded=lambda _batch_id: "excluded: worker w",
    )
    plan = selection.plan(0, stop)
    assert plan is not None
    assert plan.uses == tuple(use for uses in on_record.values() for use in uses)
    assert [read.entry.batch_id for read in plan.trained] == ["0-1", "0-2", "0-3"]
    assert plan.rows == (tuple(range(15)), (), None)
    assert plan.checked
    again = selection.plan(1, stop)
    assert again is None


def test_rows_left_out_of_whole_batches_are_named_beside_what_is_trained_on() -> None:
    batches = [random_batch(number) for number in range(3)]
    reads = [IndexedBatch(replace(ENTRY, batch_id=batch.batch_id), 10 * n) for n, batch in enumerate(batches)]
    tokens = batches[1].tokens.copy()
    tokens[[0, -1]] = 99, -1
    bad = replace(batches[1], tokens=tokens, temperatures=np.where(np.arange(16) == 3, 1e-40, 1.0))
    worse = replace(batches[2], temperatures=np.zeros(16) + 1e-40)
    config = LearnerConfig()
    left_out = [
        use
        for read, batch in zip(reads, (batches[0], bad, worse), strict=True)
        for use in unfit_uses(read, batch, config)
    ]
    uses = without(
        [
            BatchUse(batch_id=read.entry.batch_id, index_offset=read.index_offset, rows=16, use="trained")
            for read in reads
        ],
        left_out[::-1],
    )
    assert [(use.batch_id, use.use, use.reason.partition(":")[0], use.row_numbers) for use in uses] == [
        ("0-0", "trained", "", ()),
        ("0-1", "trained", "", (1, 2, *range(4, 15))),
        ("0-1", "skipped", "left out as temperature", (3,)),
        ("0-1", "skipped", "left out as vocabulary", (0, 15)),
        ("0-2", "skipped", "left out as temperature", ()),
    ]
    assert (rows_of(uses, "trained"), rows_of(uses, "skipped")) == (29, 19)
    assert taken_rows(uses) == {0: tuple(range(16)), 10: (1, 2, *range(4, 15)), 20: ()}
    assert left_out_rows(uses) == {"temperature": 17, "vocabulary": 2}


def test_a_version_nobody_published_is_skipped_with_that_reason() -> None:
    plan, _ = take([5, 0, 0, 0])
    assert plan is not None
    assert (plan.uses[0].use, plan.uses[0].reason) == ("skipped", "policy version 5 is not on record")


def test_manifests_are_read_again_when_a_batch_names_a_new_version() -> None:
    published = {0: 0}
    stop = threading.Event()
    reads = []

    def read(_version: int) -> dict[int, int]:
        reads.append(dict(published))
        return dict(published)

    selection = BatchSelection(
        ScriptedReader([0, 0, 0, 1, 1, 1], stop),  # type: ignore[arg-type]
        rollouts_per_step=40,
        max_policy_lag=2,
        read_version_steps=read,
        skipped=lambda _uses: None,
    )
    selection.plan(0, stop)
    published[1] = 1
    plan = selection.plan(1, stop)
    assert plan is not None
    assert rows_of(plan.uses, "trained") == 48
    assert len(reads) == 2


def test_figures_are_over_what_is_trained_only() -> None:
    plan, _ = take([9, 0, 0, 0])
    assert plan is not None
    assert [read.entry.batch_id for read in plan.trained] == ["0-1", "0-2", "0-3"]
    batches = [random_batch(number) for number in (1, 2, 3)]
    metrics = totals_of(batches).metrics()
    rewards = np.concatenate([batch.rewards for batch in batches])
    assert metrics["trained/rollouts"] == 48
    assert metrics["trained/reward"] == pytest.approx(rewards.mean())
    assert metrics["trained/reward_std"] == pytest.approx(rewards.std())
    trained_tokens = sum(int(batch.loss_mask.sum()) for batch in batches)
    assert metrics["trained/completions/mean_length"] == pytest.approx(trained_tokens / 48)
    truncated = np.concatenate([batch.truncated for batch in batches])
    assert metrics["trained/completions/clipped_ratio"] == pytest.approx(truncated.mean())


@given(st.lists(st.integers(1, 1000), max_size=20), st.integers(1, 5))
def test_processes_share_a_step_without_gap_or_overlap_and_about_equally(tokens: list[int], processes: int) -> None:
    trained = [IndexedBatch(replace(ENTRY, tokens=count), 3 * number) for number, count in enumerate(tokens)]
    shares = [share_of(trained, process, processes) for process in range(processes)]
    assert sorted(read.index_offset for share in shares for read in share) == [read.index_offset for read in trained]
    assert all(list(share) == sorted(share, key=lambda read: read.index_offset) for share in shares)
    loads = [sum(read.entry.tokens for read in share) for share in shares]
    assert max(loads) - min(loads) <= max(tokens, default=0)


class DrainedReader(ScriptedReader):
    """Returns the batches of a list, then None forever; `position` is after the last batch returned."""

    def poll(self, timeout_s: float) -> IndexedBatch | None:
        return super().poll(timeout_s) if self._script else None


def last_steps(versions: list[int | None], **more: Any) -> tuple[list[StepPlan], list[tuple[BatchUse, ...]]]:
    """The steps of a run that is drained after these batches, and the skips reported meanwhile."""
    stop, reported = threading.Event(), []
    reader = DrainedReader(versions, stop)
    end = reader.apart * (len(versions) - 1) + 1
    selection = BatchSelection(
        reader,  # type: ignore[arg-type]
        rollouts_per_step=40,
        max_policy_lag=2,
        read_version_steps=lambda _version: {0: 0},
        skipped=reported.append,
        nothing_after=lambda position: position >= end,
        **more,
    )
    plans = (selection.plan(step, stop) for step in itertools.count())
    return [plan for plan in itertools.takewhile(lambda plan: plan is not None, plans) if plan], reported


def test_the_last_step_of_a_drained_run_takes_what_is_left_and_none_follows() -> None:
    plans, _ = last_steps([0] * 5)
    assert [[use.index_offset for use in plan.uses] for plan in plans] == [[0, 10, 20], [30, 40]]
    assert last_steps([0] * 3)[0][-1].position == 21
    assert len(last_steps([0] * 3)[0]) == 1


@pytest.mark.parametrize("apart", [1, 10])
def test_a_short_step_on_record_stays_short_when_the_run_went_on(apart: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedReader, "apart", apart)
    plans, _ = last_steps([0] * 5, last_of={1: apart}.get)
    assert [use.index_offset for use in plans[0].uses] == [0, apart]
    assert plans[1].uses[0].index_offset == 2 * apart
