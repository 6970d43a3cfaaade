"""Measures the cost of the log: trains with a run's recipe in one process, without Kafka or lag, and compares rewards.

Model, warm start, prompts, estimator, optimizer and rollouts per step are the same; each step trains on rollouts
sampled with the parameters of the previous step. Differences are due to policy lag, drops, transport and chance; the
timing of a run over the log varies, so no two runs are equal.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rollstream.consumers.grouping.core.estimators import Estimator, Outcomes, estimator
from rollstream.consumers.learner.pretrained import resolved, tokenizer_of
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.environments import environments_of
from rollstream.pipeline.roles.jax_runtime import prepare_jax
from rollstream.pipeline.text_tables import table
from rollstream.producers.environment import SingleTurn
from rollstream.producers.inference.decoding import row_seed
from rollstream.topics.errors import ConfigurationError

if TYPE_CHECKING:
    from rollstream.consumers.learner.input.packing import TrainingSequence

_SPANS = 8
"""Maximum number of rows of the comparison."""


@dataclass(frozen=True, kw_only=True)
class StepSpan:
    """Mean rewards of the rollouts sampled by the policy versions of a span of steps; None without rollouts."""

    first: int
    last: int
    over_the_log: float | None
    one_process: float | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A run and the same recipe in one process."""

    steps: int
    seconds_over_the_log: float
    """Training time, without evaluations and the time to start processes."""
    seconds_one_process: float
    spans: tuple[StepSpan, ...]

    def as_dict(self) -> dict[str, Any]:
        """The comparison as plain values for JSON."""
        return asdict(self)


def compare(config: RunConfig, steps: int, seconds: float, rewards: Mapping[int, tuple[int, float]]) -> Comparison:
    """Train the same number of steps in this process, and compare with a run that took `seconds`.

    `rewards` holds, by policy version of the run, the number of rollouts it sampled and the sum of their rewards.
    """
    began = [time.monotonic()]
    alone = train(config, steps, lambda: began.__setitem__(0, time.monotonic()))
    return Comparison(
        steps=steps,
        seconds_over_the_log=round(seconds, 1),
        seconds_one_process=round(time.monotonic() - began[0], 1),
        spans=spans(steps, config.learner.publish_every_steps, rewards, alone),
    )


def spans(steps: int, every: int, log: Mapping[int, tuple[int, float]], alone: Sequence[float]) -> tuple[StepSpan, ...]:
    """Divide the steps into equal spans; a version belongs to the step after which it was published."""
    size = -(-max(steps, 1) // _SPANS)
    result = []
    for first in range(0, steps, size):
        last = min(first + size, steps) - 1
        of_log = [sums for version, sums in log.items() if first <= version * every <= last]
        rollouts = sum(count for count, _reward in of_log)
        means = alone[first : last + 1]
        result.append(
            StepSpan(
                first=first,
                last=last,
                over_the_log=sum(reward for _count, reward in of_log) / rollouts if rollouts else None,
                one_process=sum(means) / len(means) if means else None,
            )
        )
    return tuple(result)


def train(config: RunConfig, steps: int, ready: Callable[[], object] = lambda: None) -> list[float]:
    """Train, and return the mean reward of the rollouts sampled for each step.

    Calls `ready` once everything is compiled. Raises ConfigurationError for environments of several turns.
    """
    prepare_jax(config)
    from rollstream.consumers.learner.input.packing import TrainingSequence, pack_for
    from rollstream.consumers.learner.startup import begin
    from rollstream.consumers.learner.training.train_step import TrainStep
    from rollstream.consumers.models.slots import Row, SlotDecoder
    from rollstream.pipeline.run.warm_start import warm_start_examples

    tasks = []
    for environment in environments_of(config):
        task = environment.environment
        if not isinstance(task, SingleTurn):
            raise ConfigurationError(
                f"environment {environment.name} is not derived from SingleTurn; the comparison in one process plays "
                "single turns only"
            )
        tasks.append((environment, task, task.prompts("train")))
    weights = [environment.entry.weight for environment, _task, _prompts in tasks]
    tokenizer = tokenizer_of(config.learner)
    learner = resolved(config.learner)
    train_step = TrainStep(learner)
    state, _metrics = begin(train_step, warm_start_examples(config, tokenizer))
    train_step.warm_up(state)
    decoder = SlotDecoder(learner.model, slots=config.inference.max_rows, max_model_len=config.inference.max_model_len)
    decoder.warm_up(decoder.place(state.params))
    draw = random.Random(f"one process {config.seed}")
    estimated = estimator(config.grouping.estimator)
    ready()

    def groups(step: int) -> "tuple[list[TrainingSequence], list[float]]":
        """Sample a batch of groups; return the sequences of groups with variance, and all rewards."""
        count = max(
            1, config.inference.max_rows // max(environment.group_size for environment, _task, _prompts in tasks)
        )
        chosen = [
            (environment, task, draw.choice(prompts))
            for environment, task, prompts in draw.choices(tasks, weights, k=count)
        ]
        players = [
            (environment, prompt) for environment, _task, prompt in chosen for _ in range(environment.group_size)
        ]
        texts = [tokenizer.encode(prompt.text) for _environment, prompt in players]
        rows = [
            Row(
                prompt=text,
                seed=row_seed(config.seed, step, draw.getrandbits(63)),
                max_tokens=environment.max_tokens,
                temperature=environment.temperature,
                stop_ids=tokenizer.eos_ids,
            )
            for text, (environment, _prompt) in zip(texts, players, strict=True)
        ]
        completions = decoder.sample(decoder.place(state.params), rows)
        kept: list[TrainingSequence] = []
        rewards: list[float] = []
        end = 0
        for environment, task, prompt in chosen:
            members = range(end, end + environment.group_size)
            end = members.stop
            scores = tuple(
                task.score(
                    prompt,
                    tokenizer.decode(completions[row].tokens),
                    completions[row].finish_reason == "length",
                ).reward
                for row in members
            )
            rewards += scores
            if min(scores) == max(scores) and not (estimated.keeps_equal_rewards or config.grouping.keep_zero_variance):
                continue
            lengths = tuple(len(completions[row].tokens) for row in members)
            for row, advantage in zip(
                members, estimated.within_group(Outcomes(rewards=scores, lengths=lengths)), strict=True
            ):
                prompt_tokens, completion = texts[row], completions[row]
                length = len(prompt_tokens) + len(completion.tokens)
                kept.append(
                    TrainingSequence(
                        tokens=np.asarray([*prompt_tokens, *completion.tokens], np.int32),
                        loss_mask=np.arange(length) >= len(prompt_tokens),
                        advantages=np.full(length, advantage, np.float32),
                        generator_log_probs=np.asarray([0.0] * len(prompt_tokens) + completion.logprobs, np.float32),
                        temperature=environment.temperature,
                        truncated=completion.finish_reason == "length",
                    )
                )
        return kept, rewards

    means = []
    for step in range(steps):
        kept: list[TrainingSequence] = []
        rewards: list[float] = []
        while len(kept) < learner.rollouts_per_step:
            more, scores = groups(step)
            kept += more
            rewards += scores
        kept = over_batches(kept[: learner.rollouts_per_step], estimated, config.grouping.batch_rollouts)
        state, _metrics = train_step.train(state, pack_for(learner, kept))
        means.append(sum(rewards) / len(rewards))
    return means


def over_batches(sequences: "Sequence[TrainingSequence]", how: Estimator, batch: int) -> "list[TrainingSequence]":
    """Apply the second stage of an estimator, if it has one, to `batch` sequences at a time."""
    if how.over_batch is None:
        return list(sequences)
    result: list[TrainingSequence] = []
    for start in range(0, len(sequences), batch):
        rows = sequences[start : start + batch]
        weights = [float(row.loss_mask.sum()) for row in rows]
        advantages = how.over_batch([float(row.advantages[0]) for row in rows], weights)
        result += [
            replace(row, advantages=np.full_like(row.advantages, advantage))
            for row, advantage in zip(rows, advantages, strict=True)
        ]
    return result


def comparison_text(comparison: Comparison) -> str:
    """Return a table of both reward curves, and the time per step."""
    rows = [
        (f"{span.first}-{span.last}", _mean(span.over_the_log), _mean(span.one_process)) for span in comparison.spans
    ]
    log_s, alone_s = comparison.seconds_over_the_log, comparison.seconds_one_process
    steps = max(comparison.steps, 1)
    return (
        "cost of the log, against the same recipe in one process: mean reward of sampled rollouts\n"
        f"{table(('after steps', 'over the log', 'one process'), rows)}\n"
        f"{comparison.steps:,} steps over the log: {log_s:.0f} s, {log_s / steps:.2f} s each, recoveries included;\n"
        f"in one process: {alone_s:.0f} s, {alone_s / steps:.2f} s each. "
        "Each was run once; even two runs of one seed differ."
    )


def _mean(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
