"""Steps that draw rollouts from a buffer: the record alone repeats the draws, and every rollout is accounted for."""

import random
import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.consumers.batch_reader import IndexedBatch
from rollstream.consumers.learner.config import LearnerConfig, RolloutBufferConfig
from rollstream.consumers.learner.input.batch_selection import StepPlan, chosen_rows
from rollstream.consumers.learner.input.replay_selection import BatchRow, PastUses, ReplaySelection
from rollstream.consumers.learner.training.packing import sequences_of
from rollstream.topics.errors import ConfigurationError, StateRefused
from rollstream.topics.records import BatchIndexEntry, BatchUse, LearnerStep, TrainingBatch
from rollstream.topics.records.learner import reused_share, rows_of, trained_rows
from tests.support.batches import random_batch

ROWS = 4


def batch(number: int, version: int = 0, environment: str = "env") -> TrainingBatch:
    """A batch cut at `number` seconds, of a group that was opened half a second before."""
    made = random_batch(number, rows=ROWS, version=version)
    group = replace(made.groups[0], opened_ms=1000 * number - 500, environment=environment)
    return replace(made, groups=(group,), cut_ms=1000 * number)


class Log:
    """Batches at every second offset of an index."""

    def __init__(self) -> None:
        self.batches: dict[int, TrainingBatch] = {}

    def append(self, *batches: TrainingBatch) -> None:
        for made in batches:
            self.batches[2 * len(self.batches)] = made

    def entries(self, first: int = 0, end: int = 10**9) -> list[IndexedBatch]:
        return [IndexedBatch(_entry(made), at) for at, made in self.batches.items() if first <= at < end]

    def fetch(self, read: IndexedBatch) -> TrainingBatch:
        return self.batches[read.index_offset]


def _entry(made: TrainingBatch) -> BatchIndexEntry:
    return BatchIndexEntry(
        batch_id=made.batch_id,
        partition=0,
        offset=made.number,
        rollouts=len(made),
        tokens=len(made.tokens),
        trained_tokens=1,
        lowest_version=int(made.lowest_versions.min()),
        highest_version=0,
        size_bytes=1,
        digest="",
    )


class Reader:
    """Follows a Log; with `stutter`, a poll sometimes returns nothing before the end."""

    def __init__(self, log: Log, position: int = 0, stutter: random.Random | None = None) -> None:
        self._log, self.position, self._stutter = log, position, stutter

    @property
    def at_end(self) -> bool:
        return not self._log.entries(self.position)

    def poll(self, timeout_s: float = 1.0) -> IndexedBatch | None:
        if self._stutter is not None and self._stutter.random() < 0.3:
            return None
        for read in self._log.entries(self.position):
            self.position = read.position
            return read
        return None


class Patience(threading.Event):
    """Set once it was queried so often that the waiting code has read everything, however slow the machine is."""

    def __init__(self) -> None:
        super().__init__()
        self._questions = 1000

    def is_set(self) -> bool:
        self._questions -= 1
        return self._questions < 0


class Learner:
    """A learner without its training: takes steps, records them, and may start again from any of them."""

    def __init__(self, log: Log, config: LearnerConfig, *, seed: int = 0) -> None:
        self.log, self.config = log, config
        self.steps: dict[int, LearnerStep] = {}
        self.excluded: dict[str, str] = {}
        self.versions = {version: version for version in range(100)}
        self.earlier_steps: dict[int, int] = {}
        self.skips: list[tuple[BatchUse, ...]] = []
        self.drained = False
        self._random = random.Random(seed)
        self.start(0)

    def start(self, step: int) -> None:
        """Start from the log alone, as it was after `step` steps."""
        self.step = step
        past = [self.steps[number] for number in sorted(self.steps) if number <= step]
        position = past[-1].position if past else 0
        self.replay = ReplaySelection(
            self.config,
            Reader(self.log, position, self._random),
            fetch=self.log.fetch,
            read_version_steps=lambda _version: self.versions,
            recorded=self.steps.get,
            skipped=self.skips.append,
            excluded=lambda name: self.excluded.get(name, ""),
            earlier_steps=self.earlier_steps,
            nothing_after=lambda position: self.drained and not self.log.entries(position),
        )
        uses = PastUses.after(step, position, past)
        self.replay.restore(uses, self.log.entries(uses.first, uses.position), past)

    def plan(self) -> StepPlan | None:
        """Plan and record the next step; None if there are too few rollouts."""
        plan = self.replay.plan(self.step, Patience())
        if plan is None:
            return None
        self.step += 1
        self.steps[self.step] = LearnerStep(
            learner="l",
            step=self.step,
            input_run="r",
            uses=plan.uses,
            position=plan.position,
            policy_version=-1,
            params_digest="d",
            trained_total=0,
            skipped_total=0,
            oldest=plan.oldest,
            stream_time_ms=plan.stream_time_ms,
        )
        return plan


def config(rollouts_per_step: int = 6, **settings: Any) -> LearnerConfig:
    buffer = {"max_samples": 2, "alpha": 1.0, "max_rollout_step_delay": 3, **settings}
    return LearnerConfig(
        source="rollout_buffer", rollouts_per_step=rollouts_per_step, buffer=RolloutBufferConfig(**buffer)
    )


def names(plan: StepPlan | None) -> list[tuple[int, int]]:
    assert plan is not None
    return [(at, row) for at, rows in trained_rows(plan.uses).items() for row in rows]


def test_a_step_draws_rows_of_many_batches_and_names_them() -> None:
    log = Log()
    log.append(*(batch(number) for number in range(5)))
    learner = Learner(log, config())
    plan = learner.plan()
    assert plan is not None
    assert len(names(plan)) == 6
    assert rows_of(plan.uses, "trained") == 6
    assert plan.position == 9
    assert plan.stream_time_ms == 4000
    assert [read.index_offset for read in plan.trained] == sorted(trained_rows(plan.uses))
    for read, rows in zip(plan.trained, plan.rows, strict=True):
        assert (tuple(range(ROWS)) if rows is None else rows) == trained_rows(plan.uses)[read.index_offset]
    assert plan.lags == (0,) * 6
    # The lead sends the plan to the other processes of a learner in this form.
    assert msgspec.json.decode(msgspec.json.encode(plan), type=StepPlan) == plan


def test_what_is_trained_on_again_counts_once() -> None:
    log = Log()
    log.append(batch(0), batch(1))
    learner = Learner(log, config(rollouts_per_step=8))
    first, second = learner.plan(), learner.plan()
    assert first is not None
    assert second is not None
    assert [use.again for use in (*first.uses, *second.uses)] == [False, False, True, True]
    assert (rows_of(first.uses, "trained"), rows_of(second.uses, "trained")) == (8, 0)
    assert names(first) == names(second)
    assert (reused_share(first.uses), reused_share(second.uses), reused_share(())) == (0.0, 1.0, 0.0)
    assert learner.replay.size == 0
    assert (first.oldest, second.oldest) == (0, -1)


def test_what_was_never_drawn_is_skipped_on_record_and_what_was_drawn_leaves_without_counting() -> None:
    log = Log()
    log.append(batch(0), batch(1))
    learner = Learner(log, config(rollouts_per_step=6, max_rollout_step_delay=0))
    learner.plan()
    log.append(batch(2, version=1), batch(3, version=1))
    plan = learner.plan()
    assert plan is not None
    left = [use for use in plan.uses if use.use == "skipped"]
    assert {use.index_offset for use in left} <= {0, 2}
    assert sum(use.rows for use in left if not use.again) == rows_of(plan.uses, "skipped") == 2
    assert sum(use.rows for use in left if use.again) == 6
    assert all("1 steps old" in use.reason for use in left)


def test_skipped_rollouts_are_told_of_while_the_rest_of_a_step_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollstream.consumers.learner.input.replay_selection.REPORT_SKIPS_AFTER_S", 0.0)
    log = Log()
    log.append(batch(0))
    learner = Learner(log, config(max_rollout_timestamp_delay=0.0))
    assert learner.plan() is None
    assert [(use.batch_id, use.rows, use.reason) for use in learner.skips[0]] == [("0-0", 4, "0 s old or more")]


def test_a_step_that_waits_logs_why_its_rollouts_were_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rollstream.consumers.learner.input.replay_selection.REPORT_SKIPS_AFTER_S", 0.0)
    caplog.set_level("INFO", "rollstream")
    log = Log()
    log.append(batch(0))
    learner = Learner(log, config(max_rollout_timestamp_delay=0.0))
    assert learner.plan() is None
    log.append(batch(1))
    assert learner.plan() is None
    logged = [vars(record)["rollstream_fields"] for record in caplog.records if record.message == "rollouts_left"]
    assert logged == [{"step": 1, "rollouts": 4, "reasons": {"too_old": 4}}], "once, then it is quiet for a while"


def test_a_learner_ends_with_the_reasons_if_none_of_its_rollouts_can_be_trained_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollstream.consumers.learner.input.replay_selection.REPORT_SKIPS_AFTER_S", 0.0)
    log = Log()
    log.append(*(batch(number) for number in range(3)))
    learner = Learner(log, replace(config(), reference="carried"))
    with pytest.raises(
        ConfigurationError, match=r"step 1 .* no token .* 12 left out as reference: .*\(0-0, 0-1, 0-2\)"
    ):
        learner.plan()


def test_a_run_that_ended_with_rollouts_that_cannot_be_trained_on_logs_them(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "rollstream")
    log = Log()
    log.append(*(batch(number) for number in range(3)))
    learner = Learner(log, replace(config(), reference="carried"))
    learner.drained = True
    assert learner.plan() is None
    (logged,) = [vars(record)["rollstream_fields"] for record in caplog.records if record.message == "rollouts_left"]
    assert logged == {"step": 1, "rollouts": 12, "reasons": {"reference": 12}}


def test_rollouts_that_cannot_be_trained_on_end_no_learner_that_may_still_fill_its_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollstream.consumers.learner.input.replay_selection.REPORT_SKIPS_AFTER_S", 0.0)
    unfit = [replace(batch(number), temperatures=np.full(ROWS, 1e-40)) for number in range(1, 4)]
    log = Log()
    log.append(batch(0), *unfit)
    learner = Learner(log, config())
    assert learner.plan() is None, "four of six rollouts are held"
    few = Log()
    few.append(unfit[0])
    assert Learner(few, config()).plan() is None, "four of six rollouts came"
    remedied = Learner(log, config())
    remedied.excluded = {read.entry.batch_id: "damaged" for read in log.entries()}
    assert remedied.plan() is None, "exclusion is the remedy that the error names"


def test_time_is_the_newest_cut_that_was_read() -> None:
    log = Log()
    log.append(*(batch(number) for number in range(10)))
    learner = Learner(log, config(max_rollout_timestamp_delay=3.0))
    plan = learner.plan()
    assert plan is not None
    # Groups open half a second before their batch is cut, so those of 7, 8 and 9 s are fresh at 9 s.
    assert {at for at, _row in names(plan)} <= {14, 16, 18}
    assert rows_of(plan.uses, "skipped") == 28


def test_an_excluded_batch_leaves_and_a_step_on_record_stays_as_it_was() -> None:
    log = Log()
    log.append(*(batch(number) for number in range(4)))
    learner = Learner(log, config(max_samples=-1, max_rollout_step_delay=-1))
    learner.plan()
    learner.excluded["0-1"] = why = f"{'n' * 290}, whatever words these are"
    second = learner.plan()
    assert second is not None
    assert 2 not in {at for at, _row in names(second)}
    assert {(use.code, use.reason) for use in second.uses if use.index_offset == 2} == {("excluded", why)}
    before = dict(learner.steps)
    learner.excluded = {"0-0": "excluded: worker v"}
    for begin in (0, 1):
        learner.start(begin)
        while learner.step < 2:
            learner.plan()
        assert learner.steps == before
    third = learner.plan()
    assert third is not None
    assert {at for at, _row in names(third)} <= {4, 6}


def test_a_version_that_is_not_on_record_is_skipped_and_stays_so() -> None:
    log = Log()
    log.append(batch(0, version=7), batch(1), batch(2))
    learner = Learner(log, config())
    del learner.versions[7]
    first = learner.plan()
    assert first is not None
    assert first.uses[0].reason == "policy version 7 is not on record"
    learner.versions[7] = 0
    learner.start(0)
    assert learner.plan() == replace(first, wait_s=pytest.approx(0, abs=5))  # type: ignore[arg-type]


def test_rollouts_of_another_learner_that_is_ahead_count_as_new_when_they_are_read() -> None:
    log = Log()
    log.append(batch(0, version=50), batch(1, version=50))
    learner = Learner(log, config(max_samples=-1))
    lags = []
    for number in range(5):
        log.append(batch(2 + number, version=60))
        plan = learner.plan()
        assert plan is not None
        lags.append(max(plan.lags))
        learner.start(learner.step)
    assert lags[0] == 0
    assert max(lags) <= 3
    assert lags[-1] > 0


@pytest.mark.parametrize("stamped", [False, True])
def test_rollouts_of_an_earlier_learner_age_by_the_steps_since_they_were_sampled(stamped: bool) -> None:
    """The rollouts carry steps of the earlier learner, which was replaced after its step 50."""

    def sampled(number: int, version: int) -> TrainingBatch:
        made = batch(number, version=version)
        if not stamped:
            return made
        return replace(made, weight_steps=np.full(ROWS, version), timestamps=np.zeros(ROWS))

    log = Log()
    log.append(sampled(0, 46), sampled(1, 47), sampled(2, 50))
    learner = Learner(log, config(max_samples=-1))
    learner.versions = {46: -4, 47: -3, 50: 0, 51: 0, 52: 1}
    learner.earlier_steps = {46: -4, 47: -3, 50: 0}
    learner.start(0)
    first = learner.plan()
    assert first is not None
    assert [use.reason for use in first.uses if use.index_offset == 0] == [
        "weight step -4 is 4 steps old, at most 3 may be"
    ]
    assert set(first.lags) == {3, 0}
    log.append(batch(3, version=51), batch(4, version=99))
    second = learner.plan()
    assert second is not None
    reasons = {use.index_offset: use.reason for use in second.uses if use.use == "skipped"}
    assert reasons == {
        2: "weight step -3 is 4 steps old, at most 3 may be",
        8: "policy version 99 is not on record",
    }
    before = dict(learner.steps)
    for begin in (0, 1):
        learner.start(begin)
        while learner.step < 2:
            learner.plan()
        assert learner.steps == before


def test_other_settings_do_not_pass_for_the_step_on_record() -> None:
    log = Log()
    log.append(*(batch(number) for number in range(9)))
    learner = Learner(log, config())
    learner.plan()
    learner.config = config(alpha=30.0)
    learner.start(0)
    with pytest.raises(StateRefused, match=r"step 1 of learner 'l', executed again, draws different rollouts"):
        learner.plan()


def test_a_buffer_that_holds_less_than_a_step_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"learner\.buffer\.capacity 5 is below learner\.rollouts_per_step"):
        config(rollouts_per_step=6, capacity=5)
    for wrong in ({"capacity": 0}, {"max_samples": 0}, {"alpha": float("inf")}):
        with pytest.raises(ConfigurationError, match=rf"learner\.buffer\.{next(iter(wrong))} is"):
            RolloutBufferConfig(**wrong)  # type: ignore[arg-type]


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([-1, 1, 3]),
    st.integers(-1, 4),
    st.sampled_from([-1.0, 6.0]),
    st.integers(6, 12),
    st.booleans(),
)
def test_killed_at_any_step_it_draws_on_as_if_it_had_not_been(
    seed: int, max_samples: int, step_delay: int, time_delay: float, capacity: int, balanced: bool
) -> None:
    settings_ = config(
        max_samples=max_samples,
        max_rollout_step_delay=step_delay,
        max_rollout_timestamp_delay=time_delay,
        capacity=capacity,
        balanced=balanced,
    )
    draw, steps = random.Random(seed), 6
    logs = Log(), Log()
    learners = [Learner(log, settings_, seed=seed + i) for i, log in enumerate(logs)]
    for number in range(steps):
        new = [
            batch(
                len(logs[0].batches) + i,
                version=max(0, number - draw.choice([0, 0, 1, 3])),
                environment=draw.choice("ab"),
            )
            for i in range(draw.choice([0, 2, 5]))
        ]
        # Enough for the step in any case: more fresh rollouts than a step takes.
        new += [batch(len(logs[0].batches) + len(new) + i, version=number, environment="ab"[i % 2]) for i in range(4)]
        for log in logs:
            log.append(*new)
        if number in (2, 4):
            learners[0].excluded[f"0-{draw.randrange(len(logs[0].batches))}"] = "excluded: w"
            learners[1].excluded = dict(learners[0].excluded)
        assert learners[0].plan() is not None
        begin = draw.randrange(number + 1)
        learners[1].start(begin)
        while learners[1].step <= number:
            assert learners[1].plan() is not None
    assert learners[0].steps == learners[1].steps
    assert learners[0].replay.held == learners[1].replay.held
    assert learners[0].replay.size == learners[1].replay.size
    first: Counter[tuple[int, int]] = Counter()
    trained: set[tuple[int, int]] = set()
    for step in range(1, steps + 1):
        for use in learners[0].steps[step].uses:
            rows = {(use.index_offset, row) for row in use.row_numbers or range(use.rows)}
            assert len(rows) == use.rows
            if use.again:
                assert rows <= trained
            else:
                first.update(rows)
                trained |= rows if use.use == "trained" else set()
    assert set(first.values()) <= {1}
    never = len(logs[0].batches) * ROWS - len(first)
    assert 0 <= never <= learners[0].replay.size


def test_rows_of_a_batch_are_the_sequences_they_are_in_it() -> None:
    whole = random_batch(3, rows=6)
    chosen = chosen_rows(whole, (1, 4))
    assert chosen.uids == (whole.uids[1], whole.uids[4])
    for actual, row in zip(sequences_of(chosen), (1, 4), strict=True):
        expected = sequences_of(whole)[row]
        for name in ("tokens", "loss_mask", "advantages", "generator_log_probs"):
            assert np.array_equal(getattr(actual, name), getattr(expected, name))
    assert chosen.rewards.tolist() == whole.rewards[[1, 4]].tolist()
    assert chosen.lowest_versions.dtype == whole.lowest_versions.dtype
    by_row = replace(whole, advantages=np.arange(6, dtype="<f4"))
    assert chosen_rows(by_row, (5, 0)).advantages.tolist() == [5, 0]


def test_a_rollout_that_cannot_be_trained_on_is_never_drawn_and_is_on_record_with_its_row() -> None:
    log = Log()
    log.append(replace(batch(0), temperatures=np.array([1, 1e-40, 1, 1])), batch(1))
    learner = Learner(log, config())
    plan = learner.plan()
    assert plan is not None
    (left,) = [use for use in plan.uses if use.use == "skipped"]
    assert (left.index_offset, left.row_numbers, left.reason.partition(":")[0]) == (0, (1,), "left out as temperature")
    assert BatchRow(0, 1) not in names(plan)
    learner.start(0)
    again = learner.plan()
    assert again is not None
    assert again.uses == plan.uses


def test_a_drained_run_ends_when_no_whole_step_can_draw_rollouts_that_were_never_drawn() -> None:
    log = Log()
    log.append(*(batch(number) for number in range(5)))
    learner = Learner(log, config(max_samples=1, max_rollout_step_delay=-1))
    learner.drained = True
    drawn: list[tuple[int, int]] = []
    counts = []
    while (plan := learner.plan()) is not None:
        drawn += names(plan)
        counts.append(len(names(plan)))
    assert counts == [6, 6, 6]
    (uses,) = learner.skips
    left = [(use.index_offset, row) for use in uses for row in use.row_numbers]
    assert sorted(drawn + left) == [(at, row) for at in log.batches for row in range(ROWS)]
    assert {use.code for use in uses} == {"ended"}
    assert learner.replay.size == 0

    # Executed again, the steps are the same, even if the run went on.
    before = dict(learner.steps)
    learner.drained = False
    log.append(batch(5), batch(6))
    for begin in range(3):
        learner.start(begin)
        while learner.step < 3:
            assert learner.plan() is not None
        assert learner.steps == before
    assert learner.plan() is not None


@pytest.mark.parametrize("max_samples", [2, 3, -1])
@pytest.mark.parametrize("step_delay", [-1, 0, 1])
def test_rollouts_that_no_step_draws_before_the_end_are_skipped_on_record(max_samples: int, step_delay: int) -> None:
    log = Log()
    log.append(*(batch(number) for number in range(10)))
    learner = Learner(log, config(max_samples=max_samples, max_rollout_step_delay=step_delay, alpha=9.0))
    assert learner.plan() is not None
    learner.drained = True
    while learner.plan() is not None:
        assert learner.step <= 1 + 6, "it ends though rollouts are drawn again and again"
    settled: Counter[tuple[int, int]] = Counter()
    for uses in (*(step.uses for step in learner.steps.values()), *learner.skips[-1:]):
        for use in (use for use in uses if not use.again):
            settled.update((use.index_offset, row) for row in use.row_numbers or range(use.rows))
    assert settled == Counter((at, row) for at in log.batches for row in range(ROWS))
    assert {use.code for use in learner.skips[-1]} == ({"ended"} if step_delay < 0 else {"old_step"})
