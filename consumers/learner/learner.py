"""The learner: trains on batches in index order and publishes a policy version after each step.

Whatever kills it, a restart ends with the bits an uninterrupted one would have: the checkpoint holds the position, and
steps executed again must have the digests on record.
"""

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

import msgspec
import numpy as np

from consumers.batch_reader import first_offset
from consumers.learner.beginning import Example, begin, load_reference
from consumers.learner.checkpoint import Checkpoints
from consumers.learner.config import LearnerConfig
from consumers.learner.environment import fingerprint
from consumers.learner.intake import Outcomes, reused_share, without
from consumers.learner.mismatch import judge
from consumers.learner.pretrained import resolved
from consumers.learner.progress import Progress
from consumers.learner.recorder import Recorder
from consumers.learner.sinks import Sinks, open_sinks
from consumers.learner.sources import open_source
from consumers.learner.step import Metrics, Params, TrainStep
from consumers.learner.supply import Source, Supplied, Supply
from consumers.learner.team import Alone, Team, host_copies, in_company
from consumers.weights.layout import params_digest
from topics.config import KafkaConfig
from topics.errors import ConfigurationError
from topics.logs import event
from topics.records import BatchUse

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_WARN_EVERY_STEPS = 100
_MOST_NAMED = 20


def learn(
    config: LearnerConfig,
    kafka: KafkaConfig,
    run: str,
    *,
    warm_start_examples: Callable[[], Sequence[Example]],
    stop: threading.Event,
    team: Team | None = None,
    on_ready: Callable[[], None] = lambda: None,
    on_progress: Callable[[str], object] = lambda _what: None,
) -> int:
    """Train until `max_steps` or until `stop` is set; returns the last completed step.

    `warm_start_examples` is called when no checkpoint exists. `on_ready` is called once step 0 (version 0), or the one
    of the checkpoint, is on record; before that `on_progress` hears how far the warm start is. When this returns, a
    checkpoint of the last step is on disk. With several processes each calls it with the `team` it joined; `stop` is
    obeyed by the lead, and the others with it.

    Raises Fenced when another learner of the name takes over, StateRefused when a step executed again differs from
    its record, TeamLost when another process of the learner is gone.
    """
    config, team = resolved(config), team or Alone()
    with in_company(team), ExitStack() as stack:
        learner = _Learner(config, kafka, run, team, stack)
        learner.start(warm_start_examples, on_progress)
        on_ready()
        return learner.run(stop)


class _Learner:
    """What the parts of one learner share, in each of its processes. `start` comes first, then `run`."""

    def __init__(self, config: LearnerConfig, kafka: KafkaConfig, run: str, team: Team, stack: ExitStack) -> None:
        self._config = config
        self._kafka = kafka
        self._run = run
        self._team = team
        self._stack = stack
        self._recorder: Recorder | None = None
        if team.process == 0:
            self._recorder = stack.enter_context(Recorder(config, kafka, run, json.dumps(asdict(config.model))))
        self._sinks: Sinks | None = None
        self._checkpoints = stack.enter_context(Checkpoints(config.checkpoint, run, config.name))
        self._train_step = TrainStep(config)
        self._fingerprint = fingerprint(config)
        self._state = self._train_step.abstract_state()
        self._reference: Params | None = None
        self._progress = Progress()
        self._waited_s = 0.0
        self._warn_again_at = 0
        self._ended = time.monotonic()

    def start(self, warm_start_examples: Callable[[], Sequence[Example]], on_progress: Callable[[str], object]) -> None:
        """Restore the newest checkpoint, or make one of step 0; then have that step and its version on record."""
        restored = self._checkpoints.restore(self._state)
        metrics: Metrics = {}
        if restored is None:

            def warming(done: int, of: int, loss: float) -> None:
                on_progress(f"warm start, update {done} of {of}, loss {loss:.3f}")
                event(logger, "warm_start", update=done, of=of, loss=round(loss, 4))

            on_progress("warm start, its examples and functions are made")
            self._state, metrics = begin(self._train_step, warm_start_examples(), warming)
            if self._config.reference == "initial":
                # Before the first checkpoint: who finds one finds the reference, too.
                self._checkpoints.save_reference(self._state.params)
            if self._recorder is not None:
                # What was pruned before this learner began is not its to train on.
                position = first_offset(self._kafka, self._config.input_run or self._run)
                self._progress = replace(self._progress, position=position)
            self._checkpoint()
            self._checkpoints.wait()
        else:
            self._state, self._progress = restored.state, restored.progress
        self._reference = load_reference(self._train_step, self._checkpoints)
        arrays = host_copies(self._state.params)
        if self._recorder is not None:
            if restored is not None:
                self._recorder.same_bits = not self._changed_since(restored.fingerprint)
                self._recorder.resend(self._progress.recent_steps)
            self._sinks = self._open_sinks(self._recorder)
            step = int(self._state.step)
            recorded = self._recorder.recorded(step)
            if recorded is None:
                self._record((), self._progress.position, metrics, arrays)
            else:
                self._recorder.compare(step, params_digest(arrays), recorded.uses)
            event(
                logger,
                "learner_started" if restored is None else "learner_resumed",
                learner=self._config.name,
                step=step,
                position=self._progress.position,
                steps_again=max(self._recorder.last_recorded, step) - step,
            )

    def run(self, stop: threading.Event) -> int:
        """Steps until the last one or until `stop`; a checkpoint is complete when it returns."""
        step = int(self._state.step)
        source = open_source(
            self._config, self._kafka, self._run, step, self._progress.position, self._team.process, self._recorder
        )
        self._stack.callback(source.close)
        # Several processes place what they have together, which only the thread that trains can.
        place = self._train_step.place if self._team.processes == 1 else None
        supply = self._stack.enter_context(Supply(source, self._team, step + 1, self._config.max_steps, stop, place))
        # While the first rollouts of this version are being made.
        self._train_step.warm_up(self._state)
        self._ended = time.monotonic()
        while (supplied := self._wait(supply, source)) is not None:
            step += 1
            self._step(step, supplied)
            if step % self._config.checkpoint.every_steps == 0:
                self._checkpoint()
        self._checkpoint()
        self._checkpoints.wait()
        event(logger, "learner_finished", learner=self._config.name, step=step, stopped=stop.is_set())
        return step

    def _wait(self, supply: Supply, source: Source) -> Supplied | None:
        """What the next step is made of, or None after the last; meanwhile skipped batches go on record."""
        began = time.monotonic()
        while True:
            supplied = supply.next(_POLL_S)
            if supplied is not None or supply.ended:
                self._waited_s = time.monotonic() - began
                return supplied
            if self._recorder is not None and (skips := source.skips) is not None:
                source.skips = None
                self._recorder.record_skips(*skips, self._progress)

    def _step(self, step: int, supplied: Supplied) -> None:
        """Train, publish and record one step."""
        began = time.monotonic()
        given = supplied.packed if supplied.placed is None else supplied.placed
        self._state, metrics = self._train_step.train(self._state, given, self._reference)
        trained_s = time.monotonic() - began
        outcomes = self._add_up(step, supplied.outcomes)
        self._report_left_out(step, outcomes)
        self._refuse_empty(step, supplied, metrics, outcomes)
        arrays = host_copies(self._state.params)
        taken, ended = supplied.taken, time.monotonic()
        uses = without(taken.uses, outcomes.left_out)
        metrics |= outcomes.metrics()
        metrics |= {
            "off_policy/staleness": sum(taken.lags) / max(len(taken.lags), 1),
            "off_policy/reused": reused_share(uses),
            "perf/throughput": metrics["packing/tokens"] / (ended - self._ended),
            "time/step": trained_s,
            "time/wait_for_batch": self._waited_s,
            "time/load": supplied.load_s,
        }
        self._ended = ended
        self._record(uses, taken.position, metrics, arrays, taken.oldest, taken.stream_time_ms)
        if self._recorder is not None:
            self._warn_of_mismatch(step, metrics)

    def _report_left_out(self, step: int, outcomes: Outcomes) -> None:
        """Say which rollouts could not be trained on."""
        for use in outcomes.left_out if self._recorder is not None else ():
            rows = use.row_numbers or tuple(range(use.rows))
            event(
                logger,
                "rollouts_left_out",
                level=logging.WARNING,
                step=step,
                batch=use.batch_id,
                rows=rows[:_MOST_NAMED],
                rollouts=use.rows,
                reason=use.reason,
            )

    def _refuse_empty(self, step: int, supplied: Supplied, metrics: Metrics, outcomes: Outcomes) -> None:
        """Raise ConfigurationError, in the lead, where a step not on record has no token to train on."""
        if metrics["packing/trained_tokens"] or self._recorder is None or self._recorder.recorded(step) is not None:
            return
        reasons = Counter({use.reason: 0 for use in outcomes.left_out})
        for use in outcomes.left_out:
            reasons[use.reason] += use.rows
        if outcomes.rollouts:
            reasons[f"without a token to train, {outcomes.truncated} of them truncated"] = outcomes.rollouts
        told = "; ".join(f"{rows} {reason}" for reason, rows in reasons.most_common())
        raise ConfigurationError(
            f"step {step} of learner {self._config.name!r} has no token to train on: of its rollouts, {told}. Nothing "
            "of it was published; change the setting that leaves them out, or `rollstream exclude` what wrote them "
            f"(batches {', '.join(use.batch_id for use in supplied.taken.uses[:_MOST_NAMED])})"
        )

    def _warn_of_mismatch(self, step: int, metrics: Metrics) -> None:
        """Say that sampler and learner disagree when it begins, and now and then while it lasts."""
        warning = judge(metrics, self._config.loss)
        if warning is not None and step >= self._warn_again_at:
            event(logger, "mismatch", level=logging.WARNING, step=step, warning=warning)
            self._warn_again_at = step + _WARN_EVERY_STEPS
        elif warning is None:
            self._warn_again_at = 0

    def _add_up(self, step: int, outcomes: Outcomes) -> Outcomes:
        """The outcomes of all processes, in the lead."""
        if self._team.process:
            self._team.tell(f"outcomes/{step}/{self._team.process}", msgspec.json.encode(outcomes))
            return outcomes
        others = range(1, self._team.processes)
        told = [self._team.hear(f"outcomes/{step}/{process}") for process in others]
        # Whoever told its outcomes has heard what the step is made of.
        for key in (f"step/{step}", *(f"outcomes/{step}/{process}" for process in others)):
            self._team.forget(key)
        return sum((msgspec.json.decode(value, type=Outcomes) for value in told), outcomes)

    def _record(
        self,
        uses: tuple[BatchUse, ...],
        position: int,
        metrics: Metrics,
        arrays: dict[str, np.ndarray[Any, Any]],
        oldest: int = -1,
        stream_time_ms: int = -1,
    ) -> None:
        """Have the lead put the step on record; go on from it."""
        if self._recorder is None or self._sinks is None:
            return
        record = self._recorder.record(
            int(self._state.step),
            uses,
            position,
            metrics,
            arrays,
            self._progress,
            oldest=oldest,
            stream_time_ms=stream_time_ms,
        )
        self._progress = self._progress.after(record)
        self._sinks.write(record)

    def _open_sinks(self, recorder: Recorder) -> Sinks:
        """The sinks, with what a crash kept from them."""
        config = self._config
        sinks = open_sinks(config.sinks, self._kafka, self._run, config.name, recorder.last_recorded)
        self._stack.callback(sinks.close)
        for record in recorder.steps:
            sinks.write(record)
        return sinks

    def _changed_since(self, saved: dict[str, str]) -> bool:
        """Whether other hardware or software than at the checkpoint may make other bits of the same settings."""
        changed = {
            name: {"saved": saved.get(name), "now": self._fingerprint.get(name)}
            for name in sorted({*saved, *self._fingerprint})
            if saved.get(name) != self._fingerprint.get(name)
        }
        if changed:
            event(logger, "environment_changed", level=logging.WARNING, changed=changed)
        return bool(changed) and "configuration" not in changed

    def _checkpoint(self) -> None:
        """Begin a checkpoint of where we stand; recent steps count from it."""
        self._checkpoints.save(self._state, self._progress, self._fingerprint)
        self._progress = self._progress.saved()
