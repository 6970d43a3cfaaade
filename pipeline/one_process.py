"""What the log cost: the recipe of a run in one process, without Kafka and without lag, and its rewards beside the
run's.

The same model, warm start, prompts, estimator, optimizer and rollouts a step; each step trains on what the parameters
before it sampled. How far the two are apart is what versions behind, drops and the way cost, and chance: a run over the
log is never the same twice, as its timing is not.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from consumers.grouping.estimators import Estimator, Outcomes, estimator
from consumers.learner.pretrained import resolved, tokenizer_of
from pipeline.config import RunConfig
from pipeline.roles.jax_runtime import prepare_jax
from pipeline.tables import table
from producers.inference.batching import row_seed
from producers.tasks import create_task

if TYPE_CHECKING:
    from consumers.learner.packing import TrainingSequence

_SPANS = 8
"""Rows of the comparison."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Mean rewards of what policy versions sampled; None where they sampled nothing."""

    first: int
    last: int
    over_the_log: float | None
    one_process: float | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A run and the same recipe in one process."""

    steps: int
    seconds_over_the_log: float
    """Of training, evaluations and the start of processes left out."""
    seconds_one_process: float
    spans: tuple[Span, ...]

    def as_dict(self) -> dict[str, Any]:
        """As programs read it."""
        return asdict(self)


def compare(config: RunConfig, steps: int, seconds: float, rewards: Mapping[int, tuple[int, float]]) -> Comparison:
    """Train as many steps in this process. `rewards` are of the run: by policy version how many rollouts it sampled,
    and the sum of their rewards.
    """
    began = [time.monotonic()]
    alone = train(config, steps, lambda: began.__setitem__(0, time.monotonic()))
    return Comparison(
        steps=steps,
        seconds_over_the_log=round(seconds, 1),
        seconds_one_process=round(time.monotonic() - began[0], 1),
        spans=spans(steps, config.learner.publish_every_steps, rewards, alone),
    )


def spans(steps: int, every: int, log: Mapping[int, tuple[int, float]], alone: Sequence[float]) -> tuple[Span, ...]:
    """Steps in equal spans; a version counts where the step is after which it was published."""
    size = -(-max(steps, 1) // _SPANS)
    found = []
    for first in range(0, steps, size):
        last = min(first + size, steps) - 1
        of_log = [sums for version, sums in log.items() if first <= version * every <= last]
        rollouts = sum(count for count, _reward in of_log)
        there = alone[first : last + 1]
        found.append(
            Span(
                first=first,
                last=last,
                over_the_log=sum(reward for _count, reward in of_log) / rollouts if rollouts else None,
                one_process=sum(there) / len(there) if there else None,
            )
        )
    return tuple(found)


def train(config: RunConfig, steps: int, ready: Callable[[], object] = lambda: None) -> list[float]:
    """Mean reward of what was sampled for each step. `ready` is called once everything is compiled."""
    prepare_jax(config)
    from consumers.learner.beginning import begin
    from consumers.learner.packing import TrainingSequence, pack_for
    from consumers.learner.step import TrainStep
    from consumers.models.sampler import Sampler
    from pipeline.warm_start import warm_start_examples

    task, tokenizer = create_task(config.task, config.tasks), tokenizer_of(config.learner)
    learner = resolved(config.learner)
    train_step = TrainStep(learner)
    state, _metrics = begin(train_step, warm_start_examples(config, tokenizer))
    train_step.warm_up(state)
    prompts = task.prompts("train")
    sampler = Sampler(
        learner.model,
        row_buckets=(config.inference.max_rows,),
        max_prompt_length=max(len(tokenizer.encode(prompt.text)) for prompt in prompts),
        max_new_tokens=task.max_tokens,
    )
    sampler.warm_up(state.params)
    draw = random.Random(f"one process {config.seed}")
    estimated = estimator(config.grouping.estimator)
    size, temperature = config.worker.group_size, config.worker.temperature
    ready()

    def groups(step: int) -> "tuple[list[TrainingSequence], list[float]]":
        """A batch of groups: what of them has an advantage, and all rewards."""
        chosen = [draw.choice(prompts) for _ in range(max(1, config.inference.max_rows // size))]
        texts = [tokenizer.encode(prompt.text) for prompt in chosen for _ in range(size)]
        seeds = [row_seed(config.seed, step, draw.getrandbits(63)) for _ in texts]
        completions = sampler.sample(
            state.params, texts, seeds, [temperature] * len(texts), [task.max_tokens] * len(texts), tokenizer.eos_ids
        )
        kept: list[TrainingSequence] = []
        rewards: list[float] = []
        for number, prompt in enumerate(chosen):
            members = range(number * size, (number + 1) * size)
            scores = tuple(
                task.score(
                    prompt,
                    tokenizer.decode(completions[row].tokens.tolist()),
                    completions[row].finish_reason == "length",
                ).reward
                for row in members
            )
            rewards += scores
            if min(scores) == max(scores):
                continue
            lengths = tuple(len(completions[row].tokens) for row in members)
            for row, advantage in zip(
                members, estimated.within_group(Outcomes(rewards=scores, lengths=lengths)), strict=True
            ):
                before, said = texts[row], completions[row]
                kept.append(
                    TrainingSequence(
                        tokens=np.asarray([*before, *said.tokens.tolist()], np.int32),
                        loss_mask=np.arange(len(before) + len(said.tokens)) >= len(before),
                        advantages=np.full(len(before) + len(said.tokens), advantage, np.float32),
                        generator_log_probs=np.concatenate([np.zeros(len(before), np.float32), said.logprobs]),
                        temperature=temperature,
                        truncated=said.finish_reason == "length",
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
    """The second stage of an estimator that has one, over as many sequences at a time as grouping puts into a batch."""
    if how.over_batch is None:
        return list(sequences)
    found: list[TrainingSequence] = []
    for start in range(0, len(sequences), batch):
        rows = sequences[start : start + batch]
        weights = [float(row.loss_mask.sum()) for row in rows]
        advantages = how.over_batch([float(row.advantages[0]) for row in rows], weights)
        found += [
            replace(row, advantages=np.full_like(row.advantages, advantage))
            for row, advantage in zip(rows, advantages, strict=True)
        ]
    return found


def comparison_text(found: Comparison) -> str:
    """Both beside each other, and what a step took."""
    rows = [(f"{span.first}-{span.last}", _mean(span.over_the_log), _mean(span.one_process)) for span in found.spans]
    per_step = [seconds / max(found.steps, 1) for seconds in (found.seconds_over_the_log, found.seconds_one_process)]
    return (
        "what the log cost, beside the same recipe in one process: mean reward of what was sampled\n"
        f"{table(('after steps', 'over the log', 'one process'), rows)}\n"
        f"{found.steps:,} steps over the log: {found.seconds_over_the_log:.0f} s, {per_step[0]:.2f} s each, with "
        f"whatever was killed;\nin one process: {found.seconds_one_process:.0f} s, {per_step[1]:.2f} s each. "
        "One run of each: two runs of one seed differ, too."
    )


def _mean(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
