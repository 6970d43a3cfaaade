"""Executes recorded steps again, from a checkpoint and the log alone, and compares the parameters with the record.

A step on record names its batches by their places in the index: just these are fetched, and nothing is written. What
is gone is named before anything is trained.
"""

import ast
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

from consumers.learner.beginning import Example, begin, load_reference
from consumers.learner.checkpoint import Checkpoints
from consumers.learner.config import LearnerConfig
from consumers.learner.environment import fingerprint
from consumers.learner.intake import rows_of
from consumers.learner.prefetch import Prefetcher
from consumers.learner.pretrained import resolved
from consumers.learner.recorded import batches_of
from consumers.learner.step import Params, TrainState, TrainStep
from consumers.learner.step_log import read_steps
from consumers.learner.supply import Loader, Supplied
from consumers.learner.team import host_copies
from consumers.weights.layout import params_digest
from topics.config import KafkaConfig
from topics.errors import ConfigurationError, StateRefused
from topics.records import LearnerStep

_MOST_NAMED = 5
_POLL_S = 1.0


@dataclass(frozen=True, kw_only=True)
class RetrainedStep:
    """One step beside its record."""

    step: int
    batches: int
    """Batches it trained on."""
    trained: int
    """Rollouts of these."""
    skipped: int
    """Rollouts of batches it left out."""
    recorded: str
    """Digest of the parameters after it, as it is on record."""
    again: str
    """The same, executed again."""

    @property
    def same(self) -> bool:
        """Whether both are equal."""
        return self.recorded == self.again


@dataclass(frozen=True, kw_only=True)
class Retraining:
    """What came of it."""

    learner: str
    checkpoint: int | None
    """The checkpoint it began with; None where the initial parameters were made again."""
    last: int
    """The last step asked for."""
    steps: tuple[RetrainedStep, ...]
    """The one it began with, as it was found, then those executed again, up to the first that differs."""
    environment: Mapping[str, tuple[str, str]]
    """Settings, software and hardware that are not as they were at the checkpoint: then and now, by name."""

    @property
    def difference(self) -> RetrainedStep | None:
        """The first step that came out otherwise."""
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
) -> Retraining:
    """Execute the steps after `from_step` again, up to `to_step` (by default the last on record) or the first that
    differs.

    Begins with the newest checkpoint at or before `from_step`; for step 0, where that is gone, with the initial
    parameters and the warm start on `warm_start_examples`. `on_step` hears of each step. Raises ConfigurationError or
    StateRefused where there is nothing to begin with or no such step, TopicError naming batches that are gone.
    """
    config = resolved(config)
    if config.processes > 1:
        raise ConfigurationError(
            f"learner {config.name!r} trains in {config.processes} processes; retrain runs in one, which does not make "
            "the same bits"
        )
    recorded = {step: record for step, record in read_steps(kafka, run, config.name).items() if record.params_digest}
    last = _check_range(recorded, run, config.name, from_step, to_step)
    train_step = TrainStep(config)
    state, reference, saved = _begun(config, run, from_step, train_step, warm_start_examples)
    begins = int(state.step)
    _check_recorded(recorded, begins, last, config.name)
    taken = batches_of(kafka, recorded[begins].position, [recorded[step] for step in range(begins + 1, last + 1)])
    done: list[RetrainedStep] = []
    with ExitStack() as stack:
        loader = stack.enter_context(closing(Loader(config, kafka, recorded[begins].input_run)))
        prefetched = stack.enter_context(Prefetcher(lambda step, _: loader.load(taken[step]), begins + 1, last))
        for step in range(begins, last + 1):
            if step > begins:
                state, _ = train_step.train(state, _next(prefetched).packed, reference)
            done.append(_beside(recorded[step], state))
            on_step(done[-1])
            if not done[-1].same:
                break
    changed = {} if saved is None else differences(saved, fingerprint(config))
    return Retraining(
        learner=config.name,
        checkpoint=None if saved is None else begins,
        last=last,
        steps=tuple(done),
        environment=changed,
    )


def differences(then: Mapping[str, str], now: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """What two fingerprints differ in: each setting of the configuration by its own name, "" where one has none."""
    one, other = _flat(then), _flat(now)
    return {
        name: (one.get(name, ""), other.get(name, ""))
        for name in sorted({*one, *other})
        if one.get(name, "") != other.get(name, "")
    }


def _flat(of: Mapping[str, str]) -> dict[str, str]:
    found = {name: value for name, value in of.items() if name != "configuration"}
    with_settings: list[tuple[str, Any]] = []
    if "configuration" in of:
        with_settings.append(("learner", ast.literal_eval(of["configuration"])))
    while with_settings:
        name, value = with_settings.pop()
        if isinstance(value, dict):
            with_settings += [(f"{name}.{key}", item) for key, item in value.items()]
        else:
            found[name] = repr(value)
    return found


def _check_range(
    recorded: Mapping[int, LearnerStep], run: str, learner: str, from_step: int, to_step: int | None
) -> int:
    """The last step to execute."""
    if not recorded:
        raise ConfigurationError(f"run {run} has no steps of a learner {learner!r}; learner.name says whose are meant")
    last = max(recorded) if to_step is None else to_step
    if not 0 <= from_step < last <= max(recorded):
        raise ConfigurationError(
            f"there is nothing to execute after step {from_step} up to step {last}; learner {learner!r} of run {run} "
            f"has steps {min(recorded)} to {max(recorded)} on record"
        )
    return last


def _begun(
    config: LearnerConfig,
    run: str,
    from_step: int,
    train_step: TrainStep,
    warm_start_examples: Callable[[], Sequence[Example]],
) -> tuple[TrainState, Params | None, dict[str, str] | None]:
    """The newest state at or before a step, what its KL term compares with, and the fingerprint saved with it: None
    where there is no checkpoint for step 0, and its state was made again.
    """
    with Checkpoints(config.checkpoint, run, config.name) as checkpoints:
        before = [step for step in checkpoints.steps if step <= from_step]
        if before:
            restored = checkpoints.restore(train_step.abstract_state(), max(before))
            assert restored is not None, "a checkpoint that is named is there, or it raises"
            return restored.state, load_reference(train_step, checkpoints), restored.fingerprint
        if from_step > 0:
            there = f"there are those of steps {checkpoints.steps}" if checkpoints.steps else "there is none"
            raise StateRefused(
                f"no checkpoint at or before step {from_step} in {checkpoints.directory}: {there}; begin at a later "
                "step, or with --from-step 0 at the initial parameters"
            )
        state, _metrics = begin(train_step, warm_start_examples())
        if config.reference == "initial":
            # Copies: the next step takes the state's buffers.
            return state, train_step.frozen(host_copies(state.params)), None
        return state, load_reference(train_step, checkpoints), None


def _check_recorded(recorded: Mapping[int, LearnerStep], begins: int, last: int, learner: str) -> None:
    missing = [step for step in range(begins, last + 1) if step not in recorded]
    if missing:
        raise StateRefused(f"steps {missing[:_MOST_NAMED]} of learner {learner!r} are not on record; begin after them")


def _next(prefetched: Prefetcher[Supplied]) -> Supplied:
    while True:
        supplied = prefetched.next(_POLL_S)
        if supplied is not None:
            return supplied
        assert not prefetched.ended, "as many are made as are asked for"


def _beside(record: LearnerStep, state: TrainState) -> RetrainedStep:
    return RetrainedStep(
        step=record.step,
        batches=sum(use.use == "trained" for use in record.uses),
        trained=rows_of(record.uses, "trained"),
        skipped=rows_of(record.uses, "skipped"),
        recorded=record.params_digest,
        again=params_digest(host_copies(state.params)),
    )
