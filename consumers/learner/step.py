"""One optimizer update as jitted functions over a state.

On the same software, device kind and thread count, the same state and the same packed step give the same bits.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from consumers.learner.config import LearnerConfig
from consumers.learner.loss import SUPERVISED_METRICS, Arrays, policy_loss, supervised_loss
from consumers.learner.objective import OptimizerConfig, policy_metrics
from consumers.learner.optimizer import make_optimizer, make_schedule
from consumers.learner.packing import PackedStep, PackedUpdate, TrainingSequence, pack, padding
from consumers.models import decoder
from consumers.models.config import Compute

Metrics = dict[str, float]


class TrainState(NamedTuple):
    """Everything an update changes."""

    params: dict[str, jax.Array]
    """Parameters by Hugging Face name."""
    optimizer: Any
    """optax's state."""
    rng: jax.Array
    """Key data uint32 [2] of the learner's own random numbers."""
    step: jax.Array
    """int32: updates made so far."""


class TrainStep:
    """The compiled functions of one configuration. Holds no state of training."""

    def __init__(self, config: LearnerConfig) -> None:
        self.config = config
        self._optimizer = make_optimizer(config.optimizer, config.max_steps)
        compute = Compute(config.compute_dtype, config.remat, config.vocabulary_chunk, config.attention)
        policy = partial(policy_loss, model=config.model, compute=compute, config=config.loss)
        supervised = partial(supervised_loss, model=config.model, compute=compute)
        self._accumulate_policy = _accumulator(policy)
        self._accumulate_supervised = _accumulator(supervised)
        self._apply = jax.jit(self._update, donate_argnums=0)

    def initial_state(self) -> TrainState:
        """Random parameters from the configured seed, a fresh optimizer, step 0."""
        key = jax.random.key(self.config.seed)
        params = jax.jit(decoder.init, static_argnums=1)(key, self.config.model)
        return self.fresh_state(params)

    def fresh_state(self, params: dict[str, jax.Array]) -> TrainState:
        """A fresh optimizer and step 0 around given parameters."""
        rng = jax.random.key_data(jax.random.fold_in(jax.random.key(self.config.seed), 1))
        return TrainState(params, jax.jit(self._optimizer.init)(params), rng, jnp.zeros((), jnp.int32))

    def warm_up(self, state: TrainState) -> None:
        """Compile what `train` runs, on a step of padding whose result is thrown away."""
        step = pack(
            [],
            rows=self.config.microbatch_rows,
            sequence_length=self.config.sequence_length,
            loss=self.config.loss,
        )
        self.train(jax.tree.map(jnp.copy, state), step)

    def train(self, state: TrainState, step: PackedStep) -> tuple[TrainState, Metrics]:
        """One update. `state` is consumed. A step without a trained token updates with a zero gradient."""
        gradients, metrics = _sum_over_microbatches(
            self._accumulate_policy, state.params, policy_metrics(self.config.loss), step
        )
        state, more = self._apply(state, gradients)
        return state, {name: float(value) for name, value in jax.device_get({**metrics, **more}).items()}

    def warm_start(self, state: TrainState, examples: list[TrainingSequence]) -> tuple[TrainState, Metrics]:
        """Supervised updates on `examples` as configured; returns a state with a fresh optimizer at step 0.

        The draws come from the configured seed. With no examples or no steps configured the state is unchanged.
        """
        warm = self.config.warm_start
        if not examples or not warm.steps:
            return state, {}
        settings = OptimizerConfig(learning_rate=warm.learning_rate, final_learning_rate=warm.learning_rate)
        optimizer = make_optimizer(settings, warm.steps)
        draws = np.random.Generator(np.random.Philox(key=self.config.seed))

        @jax.jit
        def apply(
            params: dict[str, jax.Array], optimizer_state: Any, gradients: dict[str, jax.Array]
        ) -> tuple[dict[str, jax.Array], Any]:
            updates, optimizer_state = optimizer.update(gradients, optimizer_state, params)
            return optax.apply_updates(params, updates), optimizer_state

        params, optimizer_state = state.params, jax.jit(optimizer.init)(state.params)
        metrics: dict[str, jax.Array] = {}
        for _ in range(warm.steps):
            chosen = [examples[index] for index in draws.integers(len(examples), size=warm.sequences_per_step)]
            step = pack(chosen, rows=self.config.microbatch_rows, sequence_length=self.config.sequence_length)
            gradients, metrics = _sum_over_microbatches(self._accumulate_supervised, params, SUPERVISED_METRICS, step)
            params, optimizer_state = apply(params, optimizer_state, gradients)
        return self.fresh_state(params), {f"warm_start/{name}": float(value) for name, value in metrics.items()}

    def _update(self, state: TrainState, gradients: dict[str, jax.Array]) -> tuple[TrainState, dict[str, jax.Array]]:
        updates, optimizer_state = self._optimizer.update(gradients, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        schedule = make_schedule(self.config.optimizer, self.config.max_steps)
        metrics = {"optim/grad_norm": optax.global_norm(gradients), "optim/lr": jnp.asarray(schedule(state.step))}
        return TrainState(params, optimizer_state, state.rng, state.step + 1), metrics


def _accumulator(loss: Any) -> Any:
    """A jitted function that adds one microbatch's gradient and metrics to the sums so far, whose buffers it takes."""

    def accumulate(
        params: dict[str, jax.Array], sums: tuple[Any, Any], batch: Arrays, denominators: Arrays
    ) -> tuple[Any, Any]:
        def of(params: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
            result: tuple[jax.Array, dict[str, jax.Array]] = loss(params, batch=batch, denominators=denominators)
            return result

        total: tuple[Any, Any] = jax.tree.map(jnp.add, sums, jax.grad(of, has_aux=True)(params))
        return total

    return jax.jit(accumulate, donate_argnums=1)


def _sum_over_microbatches(
    accumulate: Any, params: dict[str, jax.Array], names: Sequence[str], step: PackedStep
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Gradients and the metrics called `names`, starting from zero so that the first microbatch is like the others."""
    sums: tuple[Any, Any] = _zeros(params), {name: jnp.zeros((), jnp.float32) for name in names}
    denominators = {
        "tokens": np.float32(max(step.trained_tokens, 1)),
        "sequences": np.float32(max(step.trained_sequences, 1)),
    }
    for microbatch in step.microbatches:
        sums = accumulate(params, sums, microbatch.arrays(), denominators)
    return sums


@jax.jit
def _zeros(params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: jnp.zeros_like(value) for name, value in params.items()}
