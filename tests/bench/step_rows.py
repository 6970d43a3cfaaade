"""Rows `step` and `share-64`: what a learner's step costs against a loop written by hand, and how a step is shared.

`step` trains the same model on the same microbatches as the loop. `share-64` lays out a step for 64 processes, and
shows how many of the positions that 1 to 64 of them compute hold a token.
"""

from dataclasses import replace

import numpy as np

from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.objective import LossConfig, OptimizerConfig
from rollstream.consumers.learner.reproducibility import prepare_environment
from rollstream.consumers.learner.training.packing import PackedStep, TrainingSequence, pack_for, sequences_of
from rollstream.consumers.models.config import DecoderConfig
from tests.bench.learner_rows import cut_batch
from tests.bench.measure import Row, Settings, Stopwatch, Timing, interleaved
from tests.support.batches import random_batch

_PER_STEP = 32
_CLOSE = 1e-3
"""Largest difference between the parameters that the two sides end with; a rate of 1e-3 moves them by more."""
_PROCESSES = (1, 2, 4, 16, 64)


def step_config() -> LearnerConfig:
    """A learner of a model with 0.9 million parameters, whose products take most of the time of a step."""
    return LearnerConfig(
        model=DecoderConfig(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=384),
        loss=LossConfig(name="dapo"),
        optimizer=OptimizerConfig(name="adam", learning_rate=1e-3, final_learning_rate=1e-3, schedule="constant"),
        rollouts_per_step=_PER_STEP,
        microbatch_rows=8,
        sequence_length=128,
        threads=1,
    )


def measure_step(settings: Settings) -> Row:
    """Train with the learner's step, and with the loop."""
    config = step_config()
    prepare_environment(config)
    import jax

    from rollstream.consumers.learner.training.train_step import TrainStep
    from tests.bench.minimal_learner import MinimalLoop, Shape, fresh

    steps = [
        pack_for(config, sequences_of(cut_batch(number, rows=_PER_STEP, answers=(16, 112))))
        for number in range(max(2, settings.rollouts // 2000))
    ]
    arrays = [[batch.arrays() for batch in step.microbatches] for step in steps]
    model, adam, recipe = config.model, config.optimizer, config.loss.recipe
    loop = MinimalLoop(
        Shape(
            layers=model.num_hidden_layers,
            head_dim=model.head_dim,
            rope_theta=model.rope_theta,
            eps=model.rms_norm_eps,
            clip_low=recipe.clip_low,
            clip_high=recipe.clip_high,
            rate=adam.learning_rate,
            beta1=adam.beta1,
            beta2=adam.beta2,
            adam_eps=adam.epsilon,
            max_norm=adam.max_grad_norm,
        )
    )
    train_step = TrainStep(config)
    start = train_step.initial_state()
    ends: list[dict[str, jax.Array]] = []

    def ours() -> Timing:
        state = jax.tree.map(jax.numpy.copy, start)
        watch = Stopwatch()
        for step in steps:
            state, _metrics = train_step.train(state, step)
        timing = watch.timing(len(steps) * _PER_STEP)
        ends.append(state.params)
        return timing

    def raw() -> Timing:
        state = fresh(start.params)
        watch = Stopwatch()
        for step, microbatches in zip(steps, arrays, strict=True):
            state, _loss = loop.train(state, microbatches, step.trained_tokens)
        timing = watch.timing(len(steps) * _PER_STEP)
        ends.append(state.params)
        return timing

    ours(), raw()  # This compiles both.
    learner, by_hand = interleaved(settings.repetitions, ours, raw)
    differences = [float(abs(ends[0][name] - ends[1][name]).max()) for name in start.params]
    if max(differences) > _CLOSE:
        raise RuntimeError(f"the loop trains another model: parameters differ by {max(differences):g}")
    tokens = sum(step.tokens for step in steps) / (len(steps) * _PER_STEP)
    return Row(
        name="step",
        what="a learner's step of 32 rollouts, with all of its metrics",
        baseline="a loop written by hand for the same model, loss and optimizer",
        size_bytes=0,
        ours=learner,
        raw=by_hand,
        figures={
            "tokens/s": tokens * sorted(timing.rate for timing in learner)[len(learner) // 2],
            "tokens/s of the loop": tokens * sorted(timing.rate for timing in by_hand)[len(by_hand) // 2],
            "largest difference of parameters": max(differences),
        },
    )


def measure_share(settings: Settings) -> Row:
    """Lay out a step for 64 processes, and for one."""
    config = LearnerConfig(
        model=DecoderConfig(), microbatch_rows=64, sequence_length=2048, length_buckets=(512, 1024), too_long="truncate"
    )
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(np.log(500), 0.8, max(64, settings.rollouts // 64)), 16, 2000)
    sequences = [
        sequence
        for number, length in enumerate(lengths.astype(int))
        for sequence in sequences_of(random_batch(number, rows=2, answers=(length, length + 1)))
    ]

    def laid_out(processes: int) -> Timing:
        watch = Stopwatch()
        pack_for(replace(config, processes=processes), sequences)
        return watch.timing(len(sequences))

    many, one = interleaved(settings.repetitions, lambda: laid_out(64), lambda: laid_out(1))
    useful = {processes: _useful(replace(config, processes=processes), sequences) for processes in _PROCESSES}
    return Row(
        name="share-64",
        what="lay out a step in one of 64 processes, which trains on its rows of each microbatch",
        baseline="lay it out for one process",
        size_bytes=0,
        ours=many,
        raw=one,
        figures={
            **{f"useful positions of {processes}": share for processes, share in useful.items()},
            "least of one process's share": min(useful.values()) / useful[1],
        },
    )


def _useful(config: LearnerConfig, sequences: list[TrainingSequence]) -> float:
    """Share of the positions computed by all processes that hold a token."""
    step: PackedStep = pack_for(config, sequences)
    computed = 0
    for batch in step.microbatches:
        rows, length = batch.tokens.shape
        computed += -(-rows // config.processes) * config.processes * length
    return step.tokens / computed
