"""Statistics of a run from its records: rates, counts by fate, staleness of the training data.

Pure: it takes records in the order a reader gets them, and returns a `RunSnapshot` for displays and programs. Counts
come from the journal, so they need no other reads; the ledger verifies them.
"""

import itertools
import math
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rollstream.pipeline.audit.configuration_history import (
    ConfigurationHistory,
    ConfigurationSummary,
    newest_summary,
)
from rollstream.pipeline.audit.record_counts import RecordCounts
from rollstream.pipeline.run.component_metrics import ComponentMetrics
from rollstream.pipeline.run.diagnoses import FlowFacts
from rollstream.topics.records import BatchIndexEntry, BatchUse, FateCount, JournalRecord, LearnerStep, PolicyManifest
from rollstream.topics.records.journal import JournalCounts, from_ranges

WINDOW_S = 10
"""Number of whole seconds over which rates are averaged."""
_KEPT_S = 6 * WINDOW_S
_NO_TIME_S = 1e11
"""Later times, from the year 5138 on, are ignored as invalid."""
_STEP_TIMES = 21
_MOST_SPANS = 4096
_MOST_BATCHES = 10_000
_MOST_STEPS = 10_000
POINTS = 36
"""Maximum number of points of a curve."""


@dataclass(kw_only=True)
class RunSnapshot(RecordCounts):
    """State of a run at one time. Rates are per second, over the last ten seconds; if the run is idle, over the
    ten seconds up to its newest record."""

    run: str
    seconds: float = 0.0
    """Time from the first record to the newest."""
    quiet_s: float = 0.0
    """Time since the newest record."""
    waiting: int = 0
    """Batches that no step has used or skipped."""
    step: int = 0
    policy_version: int = -1
    """Newest version published."""
    policy_age_s: float = 0.0
    """Time since the newest version was published."""
    sampled_version: int = -1
    """Newest version that sampled a rollout."""
    rollouts_per_s: float = 0.0
    read_per_s: float = 0.0
    """Records read by grouping."""
    batches_per_s: float = 0.0
    steps_per_s: float = 0.0
    policies_per_s: float = 0.0
    reward: float = 0.0
    """Mean reward of the newest rollouts; `success` is the share of them that succeeded."""
    success: float = 0.0
    rewards: tuple[float, ...] = ()
    """Mean rewards over equal numbers of seconds with rollouts, oldest first; `successes` has shares of successes."""
    successes: tuple[float, ...] = ()
    staleness: Mapping[int, int] = field(default_factory=dict)
    """Rollouts trained on, by policy lag, which is how many versions the oldest rollout of their batch was behind."""
    records_skipped: int = 0
    """Records that could not be read or used."""
    history: int = 0
    """Number of offsets in all topics when reading began."""
    history_left: int = 0
    """Number of these offsets still to be read; until it is 0, the other fields describe the past."""
    waiting_for_labels: int = 0
    """Records of `unlabelled` that no labeler has read."""
    read_by_labelers: int = 0
    """Records of `unlabelled` that labelers have read."""
    paused: tuple[int, ...] = ()
    """Partitions of `rollouts` that an operator has paused."""
    paused_environments: tuple[str, ...] = ()
    """Environments that an operator has paused."""
    flat_environments: tuple[str, ...] = ()
    """Environments whose every group was dropped for equal rewards, for `FLAT_VERSIONS` policy versions."""
    wanted: Mapping[str, int] = field(default_factory=dict)
    """Numbers of processes that an operator wants, by role."""
    components: tuple[ComponentMetrics, ...] = ()
    """Newest metrics of workers, servers, grouping processes, gateways, evaluators and serve-weights."""
    stalled_stage: str = ""
    """Role to check, or `weights`, if no step was made for long; empty if the run makes steps or has ended."""
    stalled: str = ""
    """Why the run has stalled."""
    configuration: ConfigurationSummary | None = None
    """The newest grouping configuration in force; None before the first journal record."""

    @property
    def quiet(self) -> bool:
        """Whether no record arrived within the window of the rates; False while history is read."""
        return self.quiet_s > WINDOW_S and not self.history_left

    def as_dict(self) -> dict[str, Any]:
        """The snapshot as plain values for JSON, the run and its time first."""
        first = {"run": self.run, "seconds": self.seconds, "quiet_s": self.quiet_s}
        staleness = {str(lag): rollouts for lag, rollouts in self.staleness.items()}
        return {**first, **asdict(self), "staleness": staleness, "quiet": self.quiet}


class Rate:
    """Counts events by second."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def add(self, at_ms: int, count: float = 1.0) -> None:
        """Count events."""
        second = at_ms // 1000
        self._seconds[second] = self._seconds.get(second, 0.0) + count
        if len(self._seconds) > _KEPT_S:
            del self._seconds[min(self._seconds)]

    def per_s(self, until_ms: int) -> float:
        """Mean over the last `WINDOW_S` whole seconds before a time, or over fewer if counting began later."""
        end = until_ms // 1000
        within = [count for second, count in self._seconds.items() if end - WINDOW_S <= second < end]
        if not within:
            return 0.0
        return sum(within) / min(WINDOW_S, end - min(self._seconds))


class OutcomeCurve:
    """Sums of rollouts, rewards and successes over time, in a bounded number of spans of equal length."""

    def __init__(self) -> None:
        self._span_s = 1
        self._spans: dict[int, list[float]] = {}

    def add(self, at_ms: int, reward: float, success: float) -> None:
        """Add a rollout."""
        sums = self._spans.setdefault(at_ms // 1000 // self._span_s, [0.0, 0.0, 0.0])
        for i, value in enumerate((1.0, reward, success)):
            sums[i] += value
        if len(self._spans) > _MOST_SPANS:
            self._widen()

    def _widen(self) -> None:
        spans, self._spans = self._spans, {}
        self._span_s *= 2
        for number, sums in spans.items():
            wider = self._spans.setdefault(number // 2, [0.0, 0.0, 0.0])
            wider[:] = map(sum, zip(wider, sums, strict=True))

    @property
    def rollouts(self) -> int:
        """Rollouts so far."""
        return int(sum(sums[0] for sums in self._spans.values()))

    def means(self, points: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return mean rewards and shares of successes at no more than `points` points, in order of time."""
        spans = [sums for _number, sums in sorted(self._spans.items())]
        size = -(-len(spans) // points) or 1
        bins = [[sum(column) for column in zip(*spans[i : i + size], strict=True)] for i in range(0, len(spans), size)]
        return tuple(b[1] / b[0] for b in bins), tuple(b[2] / b[0] for b in bins)


class RunStatistics:
    """Accumulates the statistics of a run, record by record, in memory that does not grow with the rollouts read."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._first_ms = self._last_ms = 0
        self._positions: dict[int, int] = {}
        self._ahead: dict[int, deque[int]] = {}
        self._unfinished: dict[int, set[int]] = {}
        self._followed: set[int] = set()
        self._counts: defaultdict[int, JournalCounts] = defaultdict(JournalCounts)
        self._configurations: defaultdict[int, ConfigurationHistory] = defaultdict(ConfigurationHistory)
        self._batches = 0
        self._entries: dict[str, BatchIndexEntry] = {}
        self._early: dict[str, list[tuple[int, BatchUse]]] = {}
        self._begun: dict[str, int] = {}
        """Lowest version of each batch from which a step has taken rows, for the newest `_MOST_BATCHES` batches."""
        self._steps: dict[str, LearnerStep] = {}
        """Newest step of each learner."""
        self._counted_steps: dict[tuple[str, int], int] = {}
        """Policy version after each of the newest `_MOST_STEPS` steps counted, by learner and number."""
        self._version: dict[str, int] = {}
        self._manifest: PolicyManifest | None = None
        self._sampled = -1
        self._staleness: Counter[int] = Counter()
        self._rates = {name: Rate() for name in ("rollouts", "read", "batches", "steps", "policies")}
        self._curve = OutcomeCurve()
        self._newest_ms: dict[str, int] = {}
        self._step_times_ms: deque[int] = deque(maxlen=_STEP_TIMES)
        self._needed_rollouts = 1
        self._at_step: tuple[int, Counter[str], int] = (-1, Counter(), 0)
        """The newest step, and the numbers of rollouts that had been dropped and skipped when that step appeared."""

    def record(self, partition: int, offset: int, at_ms: int) -> None:
        """Count a record of `rollouts`, of any kind."""
        self._at(at_ms)
        if offset >= self._positions.get(partition, 0):
            self._ahead.setdefault(partition, deque()).append(offset)

    def rollout(self, at_ms: int, version: int, reward: float, success: float) -> None:
        """Count a record that is a rollout; `version` is the newest version that sampled one of its tokens."""
        self._rates["rollouts"].add(at_ms)
        self._note("rollouts", at_ms)
        self._sampled = max(self._sampled, version)
        self._curve.add(at_ms, reward, success)

    @property
    def batches(self) -> int:
        """Entries of the batch index."""
        return self._batches

    @property
    def newest_step(self) -> int:
        """Newest step of any learner; 0 before the first."""
        return max((step.step for step in self._steps.values()), default=0)

    @property
    def newest_version(self) -> int:
        """Newest policy version that a step published; -1 before the first."""
        return max(self._version.values(), default=-1)

    @property
    def counts(self) -> list[FateCount]:
        """Numbers of records whose fate is decided, by partition, environment and fate."""
        return [count for journal in self._counts.values() for count in journal.counts]

    def journal(self, record: JournalRecord, at_ms: int) -> None:
        """Count the next journal record of its partition."""
        self._at(at_ms)
        self._note("read", at_ms)
        self._rates["read"].add(at_ms, record.position - record.begin)
        self._unsettled(record)
        self._positions[record.partition] = record.position
        self._counts[record.partition].add(record)
        self._configurations[record.partition].read(record)
        ahead = self._ahead.get(record.partition, deque())
        while ahead and ahead[0] < record.position:
            ahead.popleft()

    def _unsettled(self, record: JournalRecord) -> None:
        offsets = self._unfinished.setdefault(record.partition, set())
        if not record.snapshot:
            self._followed.add(record.partition)
        elif record.partition not in self._followed:
            offsets.update(from_ranges(record.unfinished))  # earlier records were pruned
        offsets.update(from_ranges(record.admitted))
        for finished in record.finished:
            offsets.difference_update(from_ranges(finished.runs))

    def entry(self, entry: BatchIndexEntry, at_ms: int) -> None:
        """Count the next entry of the batch index."""
        self._at(at_ms)
        self._note("batches", at_ms)
        self._rates["batches"].add(at_ms)
        self._batches += 1
        if entry.batch_id in self._early:
            self._begun[entry.batch_id] = entry.lowest_version
            for version, use in self._early.pop(entry.batch_id):
                self._met(version, use, entry.lowest_version)
        else:
            self._entries[entry.batch_id] = entry

    def step(self, step: LearnerStep, at_ms: int) -> None:
        """Count a step; a step repeated after a crash counts once.

        A learner that continues after a crash sends its recent steps again, and compaction then removes their earlier
        records. So a step that was not counted yet may follow newer steps.
        """
        self._at(at_ms)
        newest = self._steps[step.learner].step if step.learner in self._steps else -1
        late = step.step < newest
        if (step.learner, step.step) in self._counted_steps or step.step <= newest - _MOST_STEPS:
            return
        earlier = self._version.get(step.learner, step.policy_version - 1)
        version = self._counted_steps.get((step.learner, step.step - 1), step.policy_version - 1) if late else earlier
        for use in step.uses:
            entry = self._entries.pop(use.batch_id, None)
            lowest = self._begun.get(use.batch_id) if entry is None else entry.lowest_version
            if lowest is None:
                early = self._early.setdefault(use.batch_id, [])
                if use.use == "trained":
                    early.append((version, use))
                continue
            if use.row_numbers or step.stream_time_ms >= 0:
                self._begun[use.batch_id] = lowest  # Later steps may use other rows, or the same rows again.
            self._met(version, use, lowest)
        _drop_oldest(self._begun, _MOST_BATCHES)
        _drop_oldest(self._early, _MOST_BATCHES)
        if step.made:
            self._counted_steps[step.learner, step.step] = max(version, step.policy_version)
            _drop_oldest(self._counted_steps, _MOST_STEPS)
        if late:
            return
        if step.made and step.step > 0:
            self._rates["steps"].add(at_ms)
        if step.params_digest:
            self._note("steps", at_ms)
            self._step_times_ms.append(at_ms)
            self._needed_rollouts = max(1, sum(use.rows for use in step.uses if use.use == "trained"))
        self._steps[step.learner] = step
        self._version[step.learner] = max(version, step.policy_version)

    def manifest(self, manifest: PolicyManifest, at_ms: int) -> None:
        """Count a policy version."""
        self._at(at_ms)
        self._rates["policies"].add(at_ms)
        if self._manifest is None or manifest.version >= self._manifest.version:
            self._manifest = manifest

    def _met(self, version: int, use: BatchUse, lowest_version: int) -> None:
        if use.use == "trained":
            self._staleness[max(0, version - lowest_version)] += use.rows

    def _note(self, what: str, at_ms: int) -> None:
        if 0 < at_ms < _NO_TIME_S * 1000:
            self._newest_ms[what] = max(self._newest_ms.get(what, 0), at_ms)

    def flow(self, snapshot: RunSnapshot, now_ms: int) -> FlowFacts:
        """Return how the run flows now, from its log alone; `snapshot` describes the same moment."""
        if self._at_step[0] != snapshot.step:
            self._at_step = snapshot.step, Counter(snapshot.dropped), snapshot.skipped
        _step, dropped, skipped = self._at_step
        times = list(self._step_times_ms)
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]

        def age_s(what: str) -> float:
            return max(0, now_ms - self._newest_ms[what]) / 1000 if what in self._newest_ms else math.inf

        since_first_s = max(0, now_ms - self._first_ms) / 1000 if self._first_ms else 0.0
        return FlowFacts(
            step_age_s=min(age_s("steps"), since_first_s),
            median_step_s=statistics.median(gaps) / 1000 if gaps else 0.0,
            rollout_age_s=age_s("rollouts"),
            read_age_s=age_s("read"),
            batch_age_s=age_s("batches"),
            version_age_s=snapshot.policy_age_s,
            version=snapshot.policy_version,
            waiting_rollouts=sum(entry.rollouts for entry in self._entries.values()),
            needed_rollouts=self._needed_rollouts,
            in_flight=snapshot.in_flight,
            unread=snapshot.unread,
            dropped={name: n - dropped[name] for name, n in snapshot.dropped.items() if n > dropped[name]},
            skipped=snapshot.skipped - skipped,
        )

    def _at(self, at_ms: int) -> None:
        if 0 < at_ms < _NO_TIME_S * 1000:
            self._first_ms = min(self._first_ms or at_ms, at_ms)
            self._last_ms = max(self._last_ms, at_ms)

    def snapshot(
        self, now_ms: int, reward: float = 0.0, success: float = 0.0, *, records_skipped: int = 0
    ) -> RunSnapshot:
        """Return the state of the run now; `reward` and `success` are the means of the newest rollouts."""
        quiet_s = max(0, now_ms - self._last_ms) / 1000 if self._last_ms else 0.0
        # For a run that is idle or has ended, its last rates are more useful than zeros.
        until_ms = now_ms if quiet_s <= WINDOW_S else self._last_ms + 1000
        fates: Counter[str] = Counter()
        for count in self.counts:
            fates[count.fate] += count.rollouts
        unread, in_flight = (sum(map(len, offsets.values())) for offsets in (self._ahead, self._unfinished))
        created = 0.0 if self._manifest is None else self._manifest.created
        published_ms = int(created * 1000) if 0 < created < _NO_TIME_S else 0
        rewards, successes = self._curve.means(POINTS)
        snapshot = RunSnapshot(
            run=self._run,
            seconds=(self._last_ms - self._first_ms) / 1000,
            quiet_s=quiet_s,
            produced=fates.total() + in_flight + unread,
            rollouts=self._curve.rollouts,
            batches=self._batches,
            trained=sum(step.trained_total for step in self._steps.values()),
            skipped=sum(step.skipped_total for step in self._steps.values()),
            in_flight=in_flight,
            unread=unread,
            waiting=len(self._entries),
            step=self.newest_step,
            policy_version=-1 if self._manifest is None else self._manifest.version,
            policy_age_s=max(0, now_ms - published_ms) / 1000 if published_ms else 0.0,
            sampled_version=self._sampled,
            rollouts_per_s=self._rates["rollouts"].per_s(until_ms),
            read_per_s=self._rates["read"].per_s(until_ms),
            batches_per_s=self._rates["batches"].per_s(until_ms),
            steps_per_s=self._rates["steps"].per_s(until_ms),
            policies_per_s=self._rates["policies"].per_s(until_ms),
            reward=reward,
            success=success,
            rewards=rewards,
            successes=successes,
            staleness=dict(sorted(self._staleness.items())),
            records_skipped=records_skipped,
            configuration=newest_summary(self._configurations.items()),
        )
        snapshot.place(fates)
        return snapshot


def _drop_oldest(by_key: dict[Any, Any], most: int) -> None:
    while len(by_key) > most:
        del by_key[next(iter(by_key))]
