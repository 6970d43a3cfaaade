"""The learner: trains on batches in index order and publishes policy versions.

A step and its version are recorded while the next step trains. On a single device, the parameters are also copied
during that time, and the next update waits for the copies. After any crash, a restarted learner executes the steps
after its checkpoint again, from the position that the checkpoint holds. They must have the digests on record, so that
it ends with the same bits as an uninterrupted learner, or agree with the record within learner.replay_tolerance.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import msgspec

from rollstream.consumers.batch_reader import check_within_index, first_offset
from rollstream.consumers.learner.checkpoint_paths import LearnerPosition, first_needed
from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.input.batch_selection import StepTotals
from rollstream.consumers.learner.input.replay_source import ReplaySource
from rollstream.consumers.learner.input.row_checks import nothing_to_train_on
from rollstream.consumers.learner.input.step_loader import BatchSource, LoadedStep, StepLoader, StepSource
from rollstream.consumers.learner.parallel.team import Alone, Team, raising_team_lost
from rollstream.consumers.learner.pretrained import published_dtype, resolved
from rollstream.consumers.learner.records.checkpoints import Checkpoints
from rollstream.consumers.learner.records.recording_thread import RecordingThread
from rollstream.consumers.learner.records.served_metrics import serve_newest
from rollstream.consumers.learner.records.step_recorder import StepParams, StepRecorder
from rollstream.consumers.learner.reproducibility import fingerprint, replay_tolerance
from rollstream.consumers.learner.startup import Example, begin, load_reference, load_teacher
from rollstream.consumers.learner.training.snapshot import Snapshots, device_checksum
from rollstream.consumers.learner.training.step_figures import mismatch_warning, throughput_metrics
from rollstream.consumers.learner.training.train_step import Metrics, Params, TrainStep
from rollstream.consumers.models.config import manifest_model
from rollstream.consumers.weights.content import converted
from rollstream.consumers.weights.shard_barrier import ShardMember
from rollstream.consumers.weights.shards import owners
from rollstream.topics.config import KafkaConfig
from rollstream.topics.control.steering import DesiredState, SteeringFollower
from rollstream.topics.errors import StateRefused
from rollstream.topics.heartbeats import beat
from rollstream.topics.logs import event
from rollstream.topics.records import BatchUse
from rollstream.topics.records.learner import left_out_rows, reused_share, without

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_PUBLISHES_AGAIN = "publishes-again"
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
    """Train until `max_steps`, the last step that operators want, the last batch of a drained run, or until `stop` is
    set; return the last completed step.

    `warm_start_examples` is called if no checkpoint exists. `on_ready` is called once step 0 (version 0), or the step
    of the checkpoint, is on record; before that `on_progress` receives the progress of the warm start. On return, a
    checkpoint of the last step is on disk. With several processes, each calls this with the `team` it joined; only
    the lead reads `stop`, and the other processes follow the lead.

    Raises Fenced if another learner takes over, StateRefused if a step executed again differs from its record,
    ConfigurationError if a step has no token to train on, TeamLost if another process of the learner is gone.
    """
    config, team = resolved(config), team or Alone()
    with raising_team_lost(team), ExitStack() as stack:
        learner = _Learner(config, kafka, run, team, stack)
        learner.start(warm_start_examples, on_progress)
        on_ready()
        return learner.run(stop)


class _Learner:
    """One process of a learner. Call `start` first, then `run`."""

    def __init__(self, config: LearnerConfig, kafka: KafkaConfig, run: str, team: Team, stack: ExitStack) -> None:
        self._config = config
        self._kafka = kafka
        self._run = run
        self._team = team
        self._stack = stack
        self._recorder: StepRecorder | None = None
        self._member: ShardMember | None = None
        if team.process == 0:
            model = manifest_model(config.model)
            self._recorder = stack.enter_context(StepRecorder(config, kafka, run, model, team))
        else:
            self._member = stack.enter_context(ShardMember(kafka, run, config.weights, team))
        self._recording: RecordingThread | None = None
        self._checkpoints = stack.enter_context(Checkpoints(config.checkpoint, run, config.name, owner=True))
        self._train_step = TrainStep(config)
        self._dtype = published_dtype(config)
        self._snapshots = Snapshots(self._dtype)
        self._fingerprint = fingerprint(config)
        self._state = self._train_step.abstract_state()
        self._owned = _owned(self._state.params, team)
        self._reference: Params | None = None
        self._teacher: Params | None = None
        self._position = LearnerPosition()
        self._waited_s = 0.0
        self._waited_for_snapshot_s = 0.0
        self._warn_again_at = 0
        self._ended = time.monotonic()

    def start(self, warm_start_examples: Callable[[], Sequence[Example]], on_progress: Callable[[str], object]) -> None:
        """Restore the newest checkpoint, or create one of step 0; then put that step and its version on record."""
        restored = self._checkpoints.restore(self._state, fingerprint=self._fingerprint)
        metrics: Metrics = {}
        if restored is None:

            def warming(done: int, updates: int, loss: float) -> None:
                on_progress(f"warm start, update {done} of {updates}, loss {loss:.3f}")
                event(logger, "warm_start", update=done, of=updates, loss=round(loss, 4))

            on_progress("warm start, preparing examples and compiling")
            self._state, metrics = begin(self._train_step, warm_start_examples(), warming)
            if self._config.reference == "initial":
                # Saved before the first checkpoint, so that every checkpoint has a reference.
                self._checkpoints.save_reference(self._state.params)
            if self._recorder is not None:
                # Skips batches that were pruned before this learner started.
                position = first_offset(self._kafka, self._config.input_run or self._run)
                self._position = replace(self._position, position=position)
            self._checkpoint()
            self._checkpoints.wait()
        else:
            self._state, self._position = restored.state, restored.position
            if self._recorder is not None:
                # Before anything of the checkpoint is written to the log.
                index = self._config.input_run or self._run
                check_within_index(self._kafka, index, self._position.position, self._config.checkpoint.directory)
        self._reference = load_reference(self._train_step, self._checkpoints)
        self._teacher = load_teacher(self._train_step)
        if self._recorder is not None and restored is not None:
            self._recorder.same_bits = not self._changed_since(restored.fingerprint)
            self._recorder.tolerance = self._tolerance_since(restored.fingerprint)
            self._recorder.resend(self._position.recent_steps)
        self._name_first_needed()
        step = int(self._state.step)
        params = self._params_after(step, self._state.params, again=self._publishes_again(step))
        self._recording = self._stack.enter_context(RecordingThread())
        if self._recorder is None:
            self._contribute(lambda: params)
            self._recording.wait()
        else:
            recorded = self._recorder.recorded(step)
            if recorded is not None:
                self._recorder.compare(step, params, recorded.uses)
            serve_newest(self._recorder.steps)
            if recorded is None:
                self._record((), self._position.position, metrics, lambda: params)
                self._recording.wait()
            event(
                logger,
                "learner_started" if restored is None else "learner_resumed",
                learner=self._config.name,
                step=step,
                position=self._position.position,
                steps_again=max(self._recorder.last_recorded, step) - step,
            )

    def run(self, stop: threading.Event) -> int:
        """Train until the last step or until `stop`; a checkpoint is complete when this returns."""
        step = int(self._state.step)
        wanted = self._wanted()
        source = self._open_source(step, lambda: wanted().drained)
        place, last = self._train_step.place, self._config.max_steps
        loader = self._stack.enter_context(
            StepLoader(source, self._team, step + 1, last, stop, place, lambda: wanted().last_step)
        )
        # Compiles while workers make the first rollouts of this version.
        self._train_step.warm_up(self._state)
        self._ended = time.monotonic()
        beat("training")
        while (loaded := self._wait(loader, source)) is not None:
            step += 1
            self._step(step, loaded)
            if step % self._config.checkpoint.every_steps == 0:
                self._checkpoint()
        self._checkpoint()
        self._checkpoints.wait()
        event(logger, "learner_finished", learner=self._config.name, step=step, stopped=stop.is_set())
        return step

    def _open_source(self, step: int, drained: Callable[[], bool]) -> StepSource:
        """Open the source as it was after `step` steps; `drained` tells whether grouping delivers nothing more."""
        config, kafka, run = self._config, self._kafka, self._run
        position, process, recorder = self._position.position, self._team.process, self._recorder
        source: StepSource
        if config.source == "rollout_buffer":
            source = ReplaySource(config, kafka, run, step, position, process, recorder, drained)
        else:
            source = BatchSource(config, kafka, run, position, process, recorder, drained)
        self._stack.callback(source.close)
        return source

    def _wanted(self) -> Callable[[], DesiredState]:
        """Return a function that returns the state operators want; outside the lead it returns the default state."""
        if self._recorder is None:
            return DesiredState
        steering = self._stack.enter_context(SteeringFollower(self._kafka, self._run))
        return lambda: steering.state

    def _wait(self, loader: StepLoader, source: StepSource) -> LoadedStep | None:
        """Wait for the next step, and record skipped batches during the wait; return None after the last step."""
        began = time.monotonic()
        while True:
            beat("training")
            loaded = loader.next(_POLL_S)
            if loaded is None:
                self._put_on_record(source)
            if loaded is not None or loader.ended:
                self._waited_s = time.monotonic() - began
                return loaded

    def _put_on_record(self, source: StepSource) -> None:
        """Record the skipped batches of a step that waits for rollouts; raise the error of a failed recording."""
        if self._recording is None:
            return
        self._recording.check()
        if self._recorder is not None and (skips := source.skips) is not None:
            source.skips = None
            self._recording.wait()
            self._recorder.record_skips(*skips, self._position)

    def _step(self, step: int, loaded: LoadedStep) -> None:
        """Train, publish and record one step."""
        began = time.monotonic()
        given = loaded.packed if loaded.placed is None else loaded.placed
        self._state, metrics = self._train_step.train(
            self._state, given, self._reference, self._teacher, self._wait_for_snapshot
        )
        trained_s = time.monotonic() - began
        outcomes = self._add_up(step, loaded)
        self._report_left_out(step, outcomes)
        self._refuse_empty(step, loaded, metrics, outcomes)
        # Wait before the snapshot, so that the host holds at most two versions: this one and the previous one.
        waited_s = 0.0 if self._recording is None else self._recording.wait()
        take = self._taking(step)
        plan, ended = loaded.plan, time.monotonic()
        uses = without(plan.uses, outcomes.left_out)
        metrics |= outcomes.metrics()
        metrics |= {
            # From the uses, because a step on record, or drawn from a buffer, is loaded without the rows left out.
            **{f"left_out/{code}": float(rows) for code, rows in left_out_rows(uses).items()},
            "off_policy/staleness": sum(plan.lags) / max(len(plan.lags), 1),
            "off_policy/reused": reused_share(uses),
            **throughput_metrics(self._config, metrics["packing/tokens"], ended - self._ended),
            "time/step": trained_s,
            "time/wait_for_batch": self._waited_s,
            "time/load": loaded.load_s,
            "time/wait_for_recording": waited_s,
            "time/wait_for_snapshot": self._waited_for_snapshot_s,
        }
        self._ended = ended
        self._record(uses, plan.position, metrics, take, plan.oldest, plan.stream_time_ms)
        if self._recorder is not None:
            self._warn_of_mismatch(step, metrics)

    def _publishes_again(self, step: int) -> bool:
        """Whether the parameters after `step`, from which this learner resumes, are published again: in every process,
        the answer of the lead."""
        if self._recorder is None:
            return msgspec.json.decode(self._team.receive(_PUBLISHES_AGAIN), type=bool)
        again = self._recorder.publishes_again(step)
        self._team.publish(_PUBLISHES_AGAIN, msgspec.json.encode(again))
        return again

    def _taking(self, step: int) -> Callable[[], StepParams]:
        """Return a function that returns the digest and copies of the parameters after a step.

        On a single device, it may run during the next step. On several devices, digest and copies are taken now:
        otherwise, the devices would have to agree on the order of the sums of this function and of the next step.
        """
        take = partial(self._params_after, step, self._state.params)
        if self._train_step.mesh.size == 1:
            return take
        params = take()
        self._waited_for_snapshot_s = params.seconds
        return lambda: params

    def _wait_for_snapshot(self) -> None:
        """Wait until the parameters whose buffers the update will reuse have been copied."""
        if self._recording is not None:
            self._waited_for_snapshot_s = self._recording.wait_until_taken()

    def _params_after(self, step: int, params: Params, *, again: bool = False) -> StepParams:
        """Digest of the parameters after a step, with copies if they are published, maybe `again`."""
        began, arrays = time.monotonic(), None
        if again or step % self._config.publish_every_steps == 0:
            arrays = self._snapshots.take(params, keep=self._owned)
        digest = device_checksum(params)
        return StepParams(digest, arrays, time.monotonic() - began)

    def _report_left_out(self, step: int, outcomes: StepTotals) -> None:
        """Log which rollouts could not be trained on."""
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

    def _refuse_empty(self, step: int, loaded: LoadedStep, metrics: Metrics, outcomes: StepTotals) -> None:
        """Raise ConfigurationError, in the lead, if a step that is not on record has no token to train on."""
        if metrics["packing/trained_tokens"] or self._recorder is None or self._recorder.recorded(step) is not None:
            return
        reasons = Counter({use.reason: 0 for use in outcomes.left_out})
        for use in outcomes.left_out:
            reasons[use.reason] += use.rows
        if outcomes.rollouts:
            reasons[f"without a token to train, {outcomes.truncated} of them truncated"] = outcomes.rollouts
        raise nothing_to_train_on(self._config.name, step, reasons, [use.batch_id for use in loaded.plan.uses])

    def _warn_of_mismatch(self, step: int, metrics: Metrics) -> None:
        """Log a warning when sampler and learner begin to disagree, and from time to time while they do."""
        warning = mismatch_warning(metrics, *self._config.every_loss)
        if warning is not None and step >= self._warn_again_at:
            event(logger, "mismatch", level=logging.WARNING, step=step, warning=warning)
            self._warn_again_at = step + _WARN_EVERY_STEPS
        elif warning is None:
            self._warn_again_at = 0

    def _add_up(self, step: int, loaded: LoadedStep) -> StepTotals:
        """Return the totals of the step. In the lead, raises StateRefused if another process packed other totals."""
        outcomes = loaded.outcomes
        if self._team.process:
            self._team.publish(f"outcomes/{step}/{self._team.process}", msgspec.json.encode(outcomes.counts()))
            return outcomes
        others = range(1, self._team.processes)
        totals = [self._team.receive(f"outcomes/{step}/{process}") for process in others]
        # A process that sent its totals has received the plan of the step, which can then be deleted.
        for key in (f"step/{step}", *(f"outcomes/{step}/{process}" for process in others)):
            self._team.forget(key)
        for process, total in zip(others, totals, strict=True):
            counts = msgspec.json.decode(total, type=dict[str, int])
            if counts != outcomes.counts():
                raise StateRefused(
                    f"process {process} of learner {self._config.name!r} packed {counts} in step {step}, but the lead "
                    f"packed {outcomes.counts()}; give all processes the same release and settings"
                )
        return outcomes

    def _record(
        self,
        uses: tuple[BatchUse, ...],
        position: int,
        metrics: Metrics,
        take: Callable[[], StepParams],
        oldest: int = -1,
        stream_time_ms: int = -1,
    ) -> None:
        """In the lead, begin to record the step once the previous step is on record.

        The other processes begin to send their tensors. `_position` is the position after the step once the recording
        has ended.
        """
        recorder, recording = self._recorder, self._recording
        if recorder is None or recording is None:
            self._contribute(take)
            return
        step = int(self._state.step)

        def record(params: StepParams) -> None:
            made = recorder.record(
                step,
                uses,
                position,
                metrics,
                params,
                self._position,
                oldest=oldest,
                stream_time_ms=stream_time_ms,
            )
            self._position = self._position.after(made)

        recording.start(take, record)

    def _contribute(self, take: Callable[[], StepParams]) -> None:
        """Begin to send this process's tensors of the version that a step publishes, if it publishes one."""
        member = self._member

        def contribute(params: StepParams) -> None:
            if member is not None and params.arrays is not None:
                member.contribute(converted(params.arrays, self._dtype))

        if self._recording is not None:
            self._recording.start(take, contribute)

    def _changed_since(self, saved: dict[str, str]) -> bool:
        """Whether hardware or software has changed since the checkpoint, but not the settings or the code, so that
        different bits are possible."""
        changed = {
            name: {"saved": saved.get(name), "now": self._fingerprint.get(name)}
            for name in sorted({*saved, *self._fingerprint})
            if saved.get(name) != self._fingerprint.get(name)
        }
        if changed:
            event(logger, "environment_changed", level=logging.WARNING, changed=changed)
        return bool(changed) and not changed.keys() & {"configuration", "code"}

    def _tolerance_since(self, saved: dict[str, str]) -> float:
        """Tolerance for steps executed again; 0 if settings or code changed, as it is meant for rounding only."""
        same = all(saved.get(name) == self._fingerprint.get(name) for name in ("configuration", "code"))
        return replay_tolerance(self._config) if same else 0.0

    def _checkpoint(self) -> None:
        """Start to save a checkpoint of the last recorded step, and start a new list of recent steps."""
        if self._recording is not None:
            self._recording.wait()
        self._checkpoints.save(self._state, self._position, self._fingerprint)
        self._position = self._position.saved()
        self._name_first_needed()

    def _name_first_needed(self) -> None:
        """In the lead, have further records name what the oldest checkpoint needs, for prune, which may not see it."""
        if self._recorder is None:
            return
        # From the files, where an unfinished save does not count.
        needed = first_needed(self._checkpoints.directory)
        if needed is not None:
            self._recorder.resumes_from(needed)


def _owned(params: Params, team: Team) -> frozenset[str]:
    """Names of the parameters that this process publishes."""
    sizes = {name: value.size * value.dtype.itemsize for name, value in params.items()}
    return frozenset(name for name, process in owners(sizes, team.processes).items() if process == team.process)
