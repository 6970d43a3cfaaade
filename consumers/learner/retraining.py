"""Retraining: executes recorded steps again from a checkpoint and the log, and compares their parameters.

The record of a step names its batches by index offset; only these are fetched, and nothing is written. Missing batches
are reported before training starts.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.input.batch_selection import batches_of
from rollstream.consumers.learner.input.prefetch import Prefetcher
from rollstream.consumers.learner.input.step_loader import BatchLoader, LoadedStep
from rollstream.consumers.learner.parallel.team import Alone, Team
from rollstream.consumers.learner.pretrained import resolved
from rollstream.consumers.learner.records.checkpoints import Checkpoints
from rollstream.consumers.learner.reproducibility import differences, fingerprint
from rollstream.consumers.learner.startup import Example, begin, load_reference, load_teacher
from rollstream.consumers.learner.training.snapshot import device_checksum, snapshot
from rollstream.consumers.learner.training.train_step import Params, TrainState, TrainStep
from rollstream.consumers.learner.user_objectives import code_of
from rollstream.consumers.weights.step_log import read_steps
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError, StateRefused
from rollstream.topics.records import LearnerStep
from rollstream.topics.records.learner import rows_of

_MOST_NAMED = 5
_POLL_S = 1.0
_AGREEMENT_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class RetrainedStep:
    """A step executed again, compared with its record."""

    step: int
    batches: int
    """Number of batches that the step trained on."""
    trained: int
    """Number of rollouts that the step trained on."""
    skipped: int
    """Number of rollouts that the step skipped."""
    recorded: str
    """Digest of the parameters after the step on record."""
    again: str
    """Digest of the parameters after the step executed again."""

    @property
    def same(self) -> bool:
        """Whether both digests are equal."""
        return self.recorded == self.again


@dataclass(frozen=True, kw_only=True)
class Retraining:
    """Result of retraining."""

    learner: str
    checkpoint: int | None
    """Step of the checkpoint that retraining started from; None if the initial parameters were generated again."""
    last: int
    """The last step to execute."""
    steps: tuple[RetrainedStep, ...]
    """The step that retraining started from, then the steps executed again, up to the first that differs."""
    environment: Mapping[str, tuple[str, str]]
    """Settings, software and hardware that differ from the checkpoint's: (then, now) by name."""

    @property
    def difference(self) -> RetrainedStep | None:
        """The first step that differs."""
        return next((step for step in self.steps if not step.same), None)


def retrain(
    config: LearnerConfig,
    kafka: KafkaConfig,
    run: str,
    from_step: int,
    to_step: int | None = None,
    *,
    warm_start_examples: Callable[[], Sequence[Example]],
    on_step: Callable[[RetrainedStep], None] = lambda _step: None,
    team: Team | None = None,
) -> Retraining:
    """Execute the steps after `from_step` again, up to `to_step` (default: the last) or the first that differs.

    Starts from the newest checkpoint at or before `from_step`; for step 0 without a checkpoint, from the initial
    parameters and the warm start on `warm_start_examples`. `on_step` is called with each step. All processes of a
    `team` (default: this process alone) call this together, and get the same result. Raises ConfigurationError or
    StateRefused if there is no checkpoint or no such step, TopicError that names missing batches.
    """
    config, team = resolved(config), team or Alone()
    recorded = {step: record for step, record in read_steps(kafka, run, config.name).items() if record.params_digest}
    last = _agreed(team, _check_range(recorded, run, config.name, from_step, to_step))
    train_step = TrainStep(config)
    state, reference, saved = _begun(config, run, from_step, train_step, warm_start_examples)
    teacher = load_teacher(train_step)
    begins = int(state.step)
    _check_recorded(recorded, begins, last, config.name)
    plans = batches_of(kafka, recorded[begins].position, [recorded[step] for step in range(begins + 1, last + 1)])
    done: list[RetrainedStep] = []
    with ExitStack() as stack:
        loader = stack.enter_context(closing(BatchLoader(config, kafka, recorded[begins].input_run, team.process)))
        prefetched = stack.enter_context(Prefetcher(lambda step, _: loader.load(plans[step]), begins + 1, last))
        for step in range(begins, last + 1):
            if step > begins:
                state, _ = train_step.train(state, _next(prefetched).packed, reference, teacher)
            done.append(_beside(recorded[step], state))
            on_step(done[-1])
            if not done[-1].same:
                break
    changed = {} if saved is None else differences(saved, fingerprint(config))
    # Code is compared with the records of the steps, because a checkpoint may be older than the code, or missing.
    changed |= differences(_code_on_record(recorded, begins + 1, last), code_of(config))
    return Retraining(
        learner=config.name,
        checkpoint=None if saved is None else begins,
        last=last,
        steps=tuple(done),
        environment=changed,
    )


def _code_on_record(recorded: Mapping[int, LearnerStep], first: int, last: int) -> dict[str, str]:
    """Users' code that the steps were computed with, by setting; every version in order if it changed."""
    code: dict[str, dict[str, None]] = {}
    for step in range(first, last + 1):
        for setting, name in recorded[step].code.items() if step in recorded else ():
            code.setdefault(setting, {})[name] = None
    return {setting: ", then ".join(names) for setting, names in code.items()}


def _check_range(
    recorded: Mapping[int, LearnerStep], run: str, learner: str, from_step: int, to_step: int | None
) -> int:
    """Return the last step to execute. Raises ConfigurationError if there is no such range of steps."""
    if not recorded:
        raise ConfigurationError(
            f"run {run} has no steps of a learner {learner!r}; set learner.name to a learner of this run"
        )
    last = max(recorded) if to_step is None else to_step
    if not 0 <= from_step < last <= max(recorded):
        raise ConfigurationError(
            f"there is nothing to execute after step {from_step} up to step {last}; learner {learner!r} of run {run} "
            f"has steps {min(recorded)} to {max(recorded)} on record"
        )
    return last


def _agreed(team: Team, last: int) -> int:
    """Return the lead's `last` in every process, because a learner may add steps before all processes read the log."""
    if team.process:
        return int(team.receive("retrain/last", _AGREEMENT_TIMEOUT_S))
    team.publish("retrain/last", str(last).encode())
    return last


def _begun(
    config: LearnerConfig,
    run: str,
    from_step: int,
    train_step: TrainStep,
    warm_start_examples: Callable[[], Sequence[Example]],
) -> tuple[TrainState, Params | None, dict[str, str] | None]:
    """Return the newest state at or before a step, its reference parameters, and its fingerprint.

    The fingerprint is None if there is no checkpoint of step 0 and its state was computed again.
    """
    with Checkpoints(config.checkpoint, run, config.name) as checkpoints:
        before = [step for step in checkpoints.steps if step <= from_step]
        if before:
            restored = checkpoints.restore(train_step.abstract_state(), max(before), fingerprint=fingerprint(config))
            assert restored is not None, "a listed checkpoint exists"
            return restored.state, load_reference(train_step, checkpoints), restored.fingerprint
        if from_step > 0:
            available = f"there are checkpoints of steps {checkpoints.steps}" if checkpoints.steps else "there is none"
            raise StateRefused(
                f"no checkpoint at or before step {from_step} in {checkpoints.directory}: {available}; begin at a "
                "later step, or at the initial parameters with --from-step 0"
            )
        state, _metrics = begin(train_step, warm_start_examples())
        if config.reference == "initial":
            # Copies, because the next step reuses the buffers of the state.
            return state, train_step.frozen(snapshot(state.params)), None
        return state, load_reference(train_step, checkpoints), None


def _check_recorded(recorded: Mapping[int, LearnerStep], begins: int, last: int, learner: str) -> None:
    missing = [step for step in range(begins, last + 1) if step not in recorded]
    if missing:
        raise StateRefused(f"steps {missing[:_MOST_NAMED]} of learner {learner!r} are not on record; begin after them")


def _next(prefetched: Prefetcher[LoadedStep]) -> LoadedStep:
    while True:
        loaded = prefetched.next(_POLL_S)
        if loaded is not None:
            return loaded
        assert not prefetched.ended, "the loader loads every requested step"


def _beside(record: LearnerStep, state: TrainState) -> RetrainedStep:
    return RetrainedStep(
        step=record.step,
        batches=sum(use.use == "trained" for use in record.uses),
        trained=rows_of(record.uses, "trained"),
        skipped=rows_of(record.uses, "skipped"),
        recorded=record.params_digest,
        again=device_checksum(state.params),
    )
