"""One training step as jitted functions over a state, on any number of devices and processes.

With the same software, device kind, mesh and thread count, the same state and packed step give the same bits; another
mesh or number of processes gives the same values up to rounding.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from numpy.typing import NDArray

from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.objective import (
    MISMATCH_METRICS,
    OptimizerConfig,
    needs_proximal,
    policy_metrics,
    reported,
)
from rollstream.consumers.learner.parallel import mesh as layout
from rollstream.consumers.learner.parallel.gathering import gathering_of, of_rows, over_devices
from rollstream.consumers.learner.pretrained import initial_params
from rollstream.consumers.learner.training.loss import (
    SUPERVISED_METRICS,
    Arrays,
    log_probs,
    policy_loss,
    supervised_loss,
)
from rollstream.consumers.learner.training.optimizer import make_optimizer, make_schedule, update_metrics
from rollstream.consumers.learner.training.packing import (
    LOSS_NUMBERS,
    PackedBatch,
    PackedStep,
    TrainingSequence,
    pack_for,
    rows_by_length,
    words_of_row,
)
from rollstream.consumers.learner.training.step_parameters import (
    chosen,
    gradient_in,
    teacher_of,
    trained_in_steps,
    trained_in_warm_start,
)
from rollstream.consumers.learner.training.unpacking import unpacked
from rollstream.consumers.models import decoder, parameters
from rollstream.consumers.models.config import ComputeSettings, DecoderConfig, expert_dtype
from rollstream.consumers.models.parameters import is_adapter
from rollstream.topics.errors import ConfigurationError

Metrics = dict[str, float]
Params = dict[str, jax.Array]
Metric = dict[str, jax.Array]
OnUpdate = Callable[[int, int, float], None]
"""Callback of the warm start: updates made, their total number, and the loss of the last update."""

_MOST_UNROLLED_LAYERS = 4
"""Largest number of layers that "auto" unrolls: so few compile quickly, and need no copies as scanned layers do."""
REPORT_EVERY_S = 5.0
"""Time between two calls of a progress callback."""


class TrainState(NamedTuple):
    """The state of training: everything that a step changes."""

    params: Params
    """Parameters by Hugging Face name, float32."""
    optimizer: Any
    """State of the optax optimizer."""
    rng: jax.Array
    """Key data uint32 [2] of the learner's own random numbers."""
    step: jax.Array
    """int32: number of completed steps."""


class PlacedBatch(NamedTuple):
    """A microbatch on the devices, rows over all processes."""

    length: int
    """Positions of a row."""
    segments: np.int32
    """Largest number of segments of a row."""
    words: jax.Array | None
    """Packed rows, from which arrays are derived; None if `own` holds all arrays."""
    own: dict[str, jax.Array]
    """Arrays [rows, length] that are not derived."""


class PlacedUpdate(NamedTuple):
    """Input of one update, on the devices."""

    microbatches: tuple[PlacedBatch, ...]
    denominators: dict[str, np.float32]
    """Denominators of sums over the update."""
    empty: bool
    """Whether the update has no trained token."""


class Gradient(NamedTuple):
    """Jitted functions that sum gradients and metrics over microbatches."""

    zeros: Any
    """Initial sums, so that the first microbatch is computed like every other."""
    add: Any
    """Adds one microbatch to the sums so far, whose buffers it reuses."""

    def __call__(
        self,
        params: Params,
        microbatches: Sequence[dict[str, jax.Array]],
        denominators: dict[str, np.float32],
    ) -> tuple[Params, Metric]:
        sums: tuple[Params, Metric] = self.zeros(params)
        for batch in microbatches:
            sums = self.add(params, sums, batch, denominators)
        return sums


@dataclass(frozen=True)
class PlacedStep:
    """Input of one step, on the devices."""

    updates: tuple[PlacedUpdate, ...]
    """Updates in order."""
    metrics: Metrics
    """Metrics of packing, over all processes."""


class TrainStep:
    """The compiled functions of one configuration on one mesh, without any state of training."""

    def __init__(self, config: LearnerConfig, mesh: Mesh | None = None) -> None:
        """Build the functions for `mesh`, by default the configured mesh of all devices of all processes.

        Raises ConfigurationError if the devices do not fit the mesh, or the rows of a microbatch cannot be split over
        the devices.
        """
        self.config = config
        self.mesh = layout.build_mesh(config.mesh) if mesh is None else mesh
        self.compilations = 0
        """Number of functions traced so far; a function is traced once for each shape."""
        self.updates_per_step = config.epochs * config.minibatches
        shares = layout.row_shares(self.mesh)
        if config.microbatch_rows % shares:
            raise ConfigurationError(
                f"learner.microbatch_rows {config.microbatch_rows} cannot be split evenly over data x fsdp = {shares} "
                f"devices; make it a multiple of {shares}"
            )
        self._rows_by_length = rows_by_length(config)
        layout.check_parts(config, self._rows_by_length)
        updates = config.max_steps * self.updates_per_step
        self._optimizer = make_optimizer(config.optimizer, updates)
        self._schedule = make_schedule(config.optimizer, updates)
        shapes = {name: _shape(shape, jnp.float32) for name, shape in parameters.shapes(config.model).items()}
        everywhere = layout.replicated(self.mesh)
        self._trained, self._taught = trained_in_steps(config, shapes), trained_in_warm_start(config, shapes)
        optimizer_shapes = jax.eval_shape(self._optimizer.init, chosen(shapes, self._trained))
        params = layout.of_params(self.mesh, shapes)
        optimizer = layout.of_optimizer(self.mesh, shapes, optimizer_shapes)
        self.shardings: Any = TrainState(params, optimizer, everywhere, everywhere)  # type: ignore[arg-type]
        """Sharding of each array of a state, as a TrainState."""
        self._rows = layout.of_rows(self.mesh)
        self._compute = ComputeSettings(
            dtype=config.compute_dtype,
            remat=config.remat,
            vocabulary_chunk=config.vocabulary_chunk,
            attention=config.attention,
            scanned=_scanned(config),
        )
        first, *others = config.every_loss
        policy = partial(policy_loss, model=config.model, compute=self._compute, config=first, others=others)
        supervised = partial(supervised_loss, model=config.model, compute=self._compute)
        self._unpacked = {
            length: self._jit(partial(unpacked, length=length), (self._rows, everywhere), self._rows)
            for length in self._rows_by_length
        }
        self._policy = self._gradient(policy, self._policy_metrics(), self._trained)
        self._supervised = self._gradient(supervised, SUPERVISED_METRICS, self._taught)
        self._log_probs = self._log_probs_of(config.model, params)
        self.teacher = teacher_of(config, self.mesh, self._log_probs_of)
        """The teacher of on-policy distillation, if there is one."""
        draw = self._jit(partial(decoder.init_from_data, config=config.model), (everywhere,), params)
        self._init = partial(draw, np.asarray(jax.random.key_data(jax.random.key(config.seed))))
        self._fresh = self._jit(self._beside, (params,), tuple(self.shardings[1:]))
        self._apply = self._jit(
            self._update,
            (self.shardings, chosen(params, self._trained), everywhere),
            (self.shardings, everywhere),
            donate_argnums=0,
        )

    def initial_state(self) -> TrainState:
        """Return a state of step 0: pretrained parameters, or random ones from the seed, and a fresh optimizer."""
        if self.config.pretrained:
            return self.fresh_state(initial_params(self.config.pretrained, self.config.model, self.shardings.params))
        return self._state_around(self._init())

    def fresh_state(self, params: Mapping[str, jax.Array | NDArray[Any]]) -> TrainState:
        """Return a state of step 0 with the given parameters, whole in every process, and a fresh optimizer."""
        return self._state_around(self._placed_params(params, jnp.float32))

    def frozen(
        self, params: Mapping[str, jax.Array | NDArray[Any]], shardings: Mapping[str, Any] | None = None
    ) -> Params:
        """Copy the parameters of a reference model, or of a model with other `shardings`, for `train`: split over the
        devices, in the compute dtype."""
        return self._placed_params(params, jnp.dtype(self.config.compute_dtype), True, shardings)

    def warm_up(self, state: TrainState) -> None:
        """Compile the functions that `train` runs, without running them; `state` is not changed."""
        for lowered in self.lower().values():
            lowered.compile()

    def lower(self) -> dict[str, jax.stages.Lowered]:
        """Return the functions that `train` runs, lowered for the devices of the mesh but not compiled, by purpose."""
        state = self.abstract_state()
        scalar = _shape((), jnp.float32)
        zeros = self._policy.zeros.lower(state.params)
        sums = jax.tree.map(lambda leaf: _shape(leaf.shape, leaf.dtype, leaf.sharding), zeros.out_info)
        lowered = {"zeros": zeros}
        for length, rows in self._rows_by_length.items():
            words = _shape((rows, words_of_row(length)), jnp.int32, self._rows)
            unpacking = self._unpacked[length].lower(words, _shape((), jnp.int32))
            lowered[f"unpacking {rows}x{length}"] = unpacking
            batch = {name: _shape(out.shape, out.dtype, self._rows) for name, out in unpacking.out_info.items()}
            if self.config.reference == "carried":
                batch["reference_log_probs"] = batch["generator_log_probs"]
            if self.config.replays_routing:
                model = self.config.model
                experts = (rows, length, model.num_hidden_layers, model.num_experts_per_tok)
                batch["routed_experts"] = _shape(experts, expert_dtype(model), self._rows)
            if len(self.config.every_loss) > 1:
                batch[LOSS_NUMBERS] = _shape((rows, length), jnp.uint8, self._rows)
            own = set(self._extra_log_probs) - {"teacher_log_probs"}
            # Both are the same program unless the policy's experts are replayed.
            for name in sorted(own)[: 2 if self.config.replays_routing else 1]:
                lowered[f"{name} {rows}x{length}"] = self._log_probs.lower(state.params, _input_of(name, batch))
            if self.teacher is not None:
                needed = _input_of("teacher_log_probs", batch)
                lowered[f"teacher {rows}x{length}"] = self.teacher.log_probs.lower(self.teacher.abstract_params, needed)
            for extra in self._extra_log_probs:
                batch[extra] = batch["generator_log_probs"]
            denominators = {"tokens": scalar, "sequences": scalar}
            lowered[f"gradient {rows}x{length}"] = self._policy.add.lower(state.params, sums, batch, denominators)
        gradients = chosen(state.params, self._trained)
        lowered["update"] = self._apply.lower(state, gradients, _shape((), jnp.int32))
        return lowered

    def abstract_state(self) -> TrainState:
        """Return shapes, dtypes and shardings of a state, into which a checkpoint can be restored."""
        shapes = jax.eval_shape(
            lambda: TrainState(
                params=(params := decoder.init(jax.random.key(0), self.config.model)),
                optimizer=self._optimizer.init(chosen(params, self._trained)),
                rng=jax.random.key_data(jax.random.key(0)),
                step=jnp.zeros((), jnp.int32),
            )
        )
        state: TrainState = jax.tree.map(
            lambda leaf, sharding: _shape(leaf.shape, leaf.dtype, sharding), shapes, self.shardings
        )
        return state

    def place(self, step: PackedStep) -> PlacedStep:
        """Put a packed step on the devices, possibly ahead of `train` and in another thread.

        Each of several processes puts its rows of the step on its own devices.
        """
        updates = tuple(
            PlacedUpdate(
                microbatches=tuple(map(self._on_devices, update.microbatches)),
                denominators={
                    "tokens": np.float32(max(update.trained_tokens, 1)),
                    "sequences": np.float32(max(update.trained_sequences, 1)),
                },
                empty=not update.trained_tokens,
            )
            for update in step.updates
        )
        metrics = {
            "packing/microbatches": float(len(step.microbatches)),
            "packing/tokens": float(step.tokens),
            "packing/trained_tokens": float(step.trained_tokens),
            "packing/padding_fraction": step.padding_fraction,
            "packing/too_long": float(step.too_long),
        }
        return PlacedStep(updates, metrics)

    def train(
        self,
        state: TrainState,
        step: PackedStep | PlacedStep,
        reference: Params | None = None,
        teacher: Params | None = None,
        before_update: Callable[[], object] = lambda: None,
    ) -> tuple[TrainState, Metrics]:
        """Train one step: `epochs` times the updates of `step`. `state` is consumed.

        An update without a trained token has a zero gradient. `reference` holds `frozen` parameters, which are needed
        if the learner computes reference log-probabilities, and `teacher` holds the teacher's. Metrics are means over
        updates with trained tokens. However, `optim/lr` is from the last update, `optim/skipped` is a sum, and without
        proximal log-probabilities, `MISMATCH_METRICS` are from the first update that trains. All processes call this
        together. `before_update` is called once the gradients of the first update are computed: until it returns, other
        threads may read the arrays of `state`.
        """
        placed = step if isinstance(step, PlacedStep) else self.place(step)
        batches = [self._complete(update, state.params, reference, teacher) for update in placed.updates]
        all_metrics, counts = [], []
        for number in range(self.updates_per_step):
            update = placed.updates[number % len(placed.updates)]
            gradients, metrics = self._policy(state.params, batches[number % len(batches)], update.denominators)
            if number == 0:
                jax.block_until_ready(gradients)  # type: ignore[no-untyped-call]
                before_update()
            state, more = self._apply(state, gradients, np.int32(number))
            all_metrics.append({**metrics, **more})
            counts.append(not update.empty)
        values = [reported(value) for value in jax.device_get(all_metrics)]
        counted = [value for value, trains in zip(values, counts, strict=True) if trains] or values[-1:]
        means = {name: float(np.mean([value[name] for value in counted])) for name in counted[0]}
        if not all(needs_proximal(loss, self.updates_per_step) for loss in self.config.every_loss):
            # Later updates would compare the sampler with a policy that the step has already changed.
            means |= {name: float(counted[0][name]) for name in MISMATCH_METRICS}
        means["optim/lr"] = float(values[-1]["optim/lr"])
        means["optim/skipped"] = float(sum(value["optim/skipped"] for value in values))
        return state, {**means, **placed.metrics}

    def warm_start(
        self,
        state: TrainState,
        examples: list[TrainingSequence],
        on_update: OnUpdate = lambda _done, _updates, _loss: None,
    ) -> tuple[TrainState, Metrics]:
        """Run the configured supervised updates on `examples`; return a state with a fresh optimizer at step 0.

        The draws come from the configured seed. Without examples or configured updates the state is unchanged. With
        several processes, each passes all examples and trains on its rows. `on_update` is called
        every few seconds, and after the last update.
        """
        warm = self.config.warm_start
        if not examples or not warm.steps:
            return state, {}
        settings = OptimizerConfig(
            learning_rate=warm.learning_rate,
            final_learning_rate=warm.learning_rate,
            state_dtype=self.config.optimizer.state_dtype,
        )
        optimizer = make_optimizer(settings, warm.steps)
        loss = replace(self.config.loss, kl_coefficient=0.0, distillation_coefficient=0.0, reward_coefficient=1.0)
        one_update = replace(self.config, minibatches=1, reference="", teacher="", loss=loss, routing_replay=False)
        draws = np.random.Generator(np.random.Philox(key=self.config.seed))
        shardings = chosen(self.shardings.params, self._taught)
        params = chosen(state.params, self._taught)
        optimizer_shapes = jax.eval_shape(optimizer.init, params)
        own = layout.of_optimizer(self.mesh, params, optimizer_shapes)

        @partial(jax.jit, in_shardings=(shardings, own, shardings), out_shardings=(shardings, own))
        def apply(params: Params, optimizer_state: Any, gradients: Params) -> tuple[Params, Any]:
            updates, optimizer_state = optimizer.update(gradients, optimizer_state, params)
            return optax.apply_updates(params, updates), optimizer_state

        optimizer_state = jax.jit(optimizer.init, out_shardings=own)(params)
        metrics: dict[str, jax.Array] = {}
        reported = time.monotonic()
        for number in range(1, warm.steps + 1):
            # Only one update is prepared ahead, so that reported updates are complete.
            jax.block_until_ready(metrics)  # type: ignore[no-untyped-call]
            if number > 1 and time.monotonic() > reported + REPORT_EVERY_S:
                reported = time.monotonic()
                on_update(number - 1, warm.steps, float(metrics["loss"]))
            drawn = draws.integers(len(examples), size=warm.sequences_per_step)
            (update,) = self.place(pack_for(one_update, [examples[index] for index in drawn])).updates
            batches = [self._arrays(batch) for batch in update.microbatches]
            gradients, metrics = self._supervised({**state.params, **params}, batches, update.denominators)
            params, optimizer_state = apply(params, optimizer_state, gradients)
        on_update(warm.steps, warm.steps, float(metrics["loss"]))
        return self._state_around({**state.params, **params}), {
            f"warm_start/{name}": float(value) for name, value in metrics.items()
        }

    @property
    def _extra_log_probs(self) -> tuple[str, ...]:
        """Names of the log-probabilities that are computed before the first update of a step."""
        computed = ["reference_log_probs"] if self.config.reference not in ("", "carried") else []
        if self.config.teacher:
            computed.append("teacher_log_probs")
        if any(needs_proximal(loss, self.updates_per_step) for loss in self.config.every_loss):
            computed.append("proximal_log_probs")
        return tuple(computed)

    def _complete(
        self, update: PlacedUpdate, params: Params, reference: Params | None, teacher: Params | None
    ) -> tuple[dict[str, jax.Array], ...]:
        """Add the log-probabilities computed before the first update to the microbatches."""
        if "reference_log_probs" in self._extra_log_probs and reference is None:
            raise ValueError(f"learner.reference is {self.config.reference!r}: give its parameters to train()")
        if self.teacher is not None and teacher is None:
            raise ValueError(f"learner.teacher is {self.config.teacher!r}: give its parameters to train()")
        models = {
            "reference_log_probs": (self._log_probs, reference),
            "proximal_log_probs": (self._log_probs, params),
            "teacher_log_probs": (self.teacher and self.teacher.log_probs, teacher),
        }
        needed = {name: models[name] for name in self._extra_log_probs}
        return tuple(
            {**batch, **{name: call(model, _input_of(name, batch)) for name, (call, model) in needed.items()}}
            for batch in map(self._arrays, update.microbatches)
        )

    def _policy_metrics(self) -> tuple[str, ...]:
        config = self.config
        return policy_metrics(*config.every_loss, reference=bool(config.reference), teacher=bool(config.teacher))

    def _log_probs_of(self, model: DecoderConfig, shardings: Any) -> Any:
        """Jit the log-probabilities of a model whose parameters have these shardings."""
        function = partial(log_probs, model=model, compute=self._compute)
        return self._jit(
            of_rows(function, gathering_of(self.config, self.mesh, shardings)),
            (shardings, self._rows),
            self._rows,
        )

    def _gradient(
        self, loss: Callable[..., tuple[jax.Array, Metric]], names: Sequence[str], trained: Sequence[str]
    ) -> Gradient:
        """Build functions that sum the metrics and the gradients of the `trained` parameters over microbatches."""

        def zeros(params: Params) -> tuple[Params, Metric]:
            return jax.tree.map(jnp.zeros_like, chosen(params, trained)), {
                name: jnp.zeros((), jnp.float32) for name in names
            }

        def add(params: Params, sums: tuple[Params, Metric], batch: Arrays, denominators: Arrays) -> Any:
            return jax.tree.map(jnp.add, sums, gradient(params, batch, denominators))

        params, everywhere = self.shardings.params, layout.replicated(self.mesh)
        gradient = over_devices(gradient_in(loss, trained), gathering_of(self.config, self.mesh, params), trained)
        sums = (chosen(params, trained), everywhere)
        return Gradient(
            zeros=self._jit(zeros, (params,), sums),
            add=self._jit(add, (params, sums, self._rows, everywhere), sums, donate_argnums=1),
        )

    def _update(
        self, state: TrainState, gradients: Params, number: jax.Array
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Apply update `number` of a step, counted from 0; the last update completes the step."""
        trained = chosen(state.params, self._trained)
        updates, optimizer_state = self._optimizer.update(gradients, state.optimizer, trained)
        params = {**state.params, **optax.apply_updates(trained, updates)}
        metrics = update_metrics(self._schedule, gradients, state.optimizer, optimizer_state)
        done = (number == self.updates_per_step - 1).astype(jnp.int32)
        return TrainState(params, optimizer_state, state.rng, state.step + done), metrics

    def _beside(self, params: Params) -> tuple[Any, jax.Array, jax.Array]:
        """Return a state of step 0 without its parameters."""
        rng = jax.random.key_data(jax.random.fold_in(jax.random.key(self.config.seed), 1))
        return self._optimizer.init(chosen(params, self._trained)), rng, jnp.zeros((), jnp.int32)

    def _state_around(self, params: Params) -> TrainState:
        return TrainState(params, *self._fresh(params))

    def _placed_params(
        self,
        params: Mapping[str, jax.Array | NDArray[Any]],
        dtype: Any,
        copy: bool = False,
        shardings: Mapping[str, Any] | None = None,
    ) -> Params:
        placed = self.shardings.params if shardings is None else shardings
        if any(is_adapter(name) and name not in params for name in placed):
            params = {**self._init(), **params}

        def place(name: str, value: jax.Array | NDArray[Any]) -> jax.Array:
            sharding: Any = placed[name]
            if isinstance(value, jax.Array) and value.sharding == sharding:
                # `copy` is for arrays that must outlive the next update, which reuses the buffers of a state.
                return jnp.array(value, dtype) if copy or value.dtype != dtype else value
            whole = np.asarray(value, dtype)
            return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

        return {name: place(name, params[name]) for name in placed}

    def _on_devices(self, batch: PackedBatch) -> PlacedBatch:
        """Put a microbatch on the devices, of which each process puts its own rows."""
        packed = batch.words.shape[1] == words_of_row(batch.length)
        arrays: dict[str, Any] = {"words": batch.words, **batch.own} if packed else batch.arrays()
        if jax.process_count() == 1:
            placed = jax.device_put(arrays, self._rows)
        else:
            own = jax.make_array_from_callback
            placed = {name: own(array.shape, self._rows, array.__getitem__) for name, array in arrays.items()}
        return PlacedBatch(batch.length, np.int32(batch.segments), placed.pop("words", None), placed)

    def _arrays(self, batch: PlacedBatch) -> dict[str, jax.Array]:
        """The arrays of a microbatch, as losses take them."""
        if batch.words is None:
            return batch.own
        return {**self._unpacked[batch.length](batch.words, batch.segments), **batch.own}

    def _jit(self, function: Callable[..., Any], in_shardings: Any, out_shardings: Any, **options: Any) -> Any:
        """Jit a function over the mesh, and count its traces."""

        def traced(*arguments: Any) -> Any:
            self.compilations += 1
            # Parts that the compiler cannot split by itself read this mesh.
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                return function(*arguments)

        return jax.jit(traced, in_shardings=in_shardings, out_shardings=out_shardings, **options)


def _input_of(name: str, batch: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays from which log-probabilities of this name are computed. Other models than the policy have
    experts of their own."""
    return batch if name == "proximal_log_probs" else {n: a for n, a in batch.items() if n != "routed_experts"}


def _scanned(config: LearnerConfig) -> bool:
    """Whether one compiled program serves all layers."""
    return config.layers == "scanned" or (
        config.layers == "auto" and config.model.num_hidden_layers > _MOST_UNROLLED_LAYERS
    )


def _shape(shape: tuple[int, ...], dtype: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)  # type: ignore[no-untyped-call]
