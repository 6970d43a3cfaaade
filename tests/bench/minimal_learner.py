"""A policy-gradient loop written by hand: one decoder, one clipped loss, Adam, and nothing else. The row `step` is
measured against it.

It shares no code with the learner. Parameters have the learner's names, so that both train the same model.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Params = dict[str, jax.Array]
Batch = Mapping[str, Any]


class Shape(NamedTuple):
    """Shape of the decoder, and settings of the loss and of Adam."""

    layers: int
    head_dim: int
    rope_theta: float
    eps: float
    clip_low: float
    clip_high: float
    rate: float
    beta1: float
    beta2: float
    adam_eps: float
    max_norm: float


class State(NamedTuple):
    """Parameters and Adam's moments."""

    params: Params
    first: Params
    second: Params
    updates: jax.Array


def fresh(params: Mapping[str, jax.Array]) -> State:
    """A state with copies of these parameters."""
    zeros = jax.tree.map(jnp.zeros_like, dict(params))
    return State(jax.tree.map(jnp.copy, dict(params)), zeros, jax.tree.map(jnp.copy, zeros), jnp.zeros((), jnp.int32))


class MinimalLoop:
    """The jitted functions of the loop."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._gradient = jax.jit(self._add_gradient, donate_argnums=1)
        self._apply = jax.jit(self._adam, donate_argnums=0)
        self._zeros = jax.jit(lambda params: (jax.tree.map(jnp.zeros_like, params), jnp.zeros(())))

    def train(self, state: State, microbatches: Sequence[Batch], trained_tokens: int) -> tuple[State, float]:
        """One update on the sum of the microbatches; returns the loss as well."""
        sums = self._zeros(state.params)
        for batch in microbatches:
            sums = self._gradient(state.params, sums, batch, float(trained_tokens))
        gradient, loss = sums
        return self._apply(state, gradient), float(loss)

    def _add_gradient(self, params: Params, sums: Any, batch: Batch, trained_tokens: Any) -> Any:
        loss, gradient = jax.value_and_grad(self._loss)(params, batch, trained_tokens)
        return jax.tree.map(jnp.add, sums, (gradient, loss))

    def _loss(self, params: Params, batch: Batch, trained_tokens: Any) -> jax.Array:
        shape = self._shape
        logits = self._decoder(params, batch)[:, :-1] / batch["temperatures"][:, 1:, None]
        targets = batch["tokens"][:, 1:, None]
        log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), targets, -1)[..., 0]
        mask, advantages = batch["loss_mask"][:, 1:], batch["advantages"][:, 1:]
        ratio = jnp.exp(jnp.clip(jnp.where(mask > 0, log_probs - batch["generator_log_probs"][:, 1:], 0.0), -20, 20))
        bounded = jnp.clip(ratio, 1 - shape.clip_low, 1 + shape.clip_high)
        return -jnp.sum(mask * jnp.minimum(ratio * advantages, bounded * advantages)) / trained_tokens

    def _decoder(self, params: Params, batch: Batch) -> jax.Array:
        shape, segments = self._shape, batch["segment_ids"]
        length = segments.shape[1]
        sees = (segments[:, :, None] == segments[:, None, :]) & jnp.tril(jnp.ones((length, length), bool))
        pairs = shape.head_dim // 2
        angles = batch["positions"][..., None, None] * shape.rope_theta ** (-jnp.arange(pairs) / pairs)
        cos, sin = jnp.cos(angles), jnp.sin(angles)

        def norm(x: jax.Array, name: str) -> jax.Array:
            return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + shape.eps) * params[f"{name}.weight"]

        def project(x: jax.Array, name: str) -> jax.Array:
            return x @ params[f"{name}.weight"].T

        def turned(x: jax.Array) -> jax.Array:
            a, b = jnp.split(x, 2, -1)
            return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

        def heads(x: jax.Array, name: str) -> jax.Array:
            return project(x, name).reshape(*x.shape[:2], -1, shape.head_dim)

        x = params["model.embed_tokens.weight"][batch["tokens"]]
        for layer in range(shape.layers):
            block = f"model.layers.{layer}"
            own = f"{block}.self_attn"
            normed = norm(x, f"{block}.input_layernorm")
            q = turned(norm(heads(normed, f"{own}.q_proj"), f"{own}.q_norm"))
            k = turned(norm(heads(normed, f"{own}.k_proj"), f"{own}.k_norm"))
            v = heads(normed, f"{own}.v_proj")
            q = q.reshape(*q.shape[:2], k.shape[2], -1, shape.head_dim)
            scores = jnp.einsum("btkgd,bskd->bkgts", q, k) * shape.head_dim**-0.5
            weights = jax.nn.softmax(jnp.where(sees[:, None, None], scores, -1e30))
            mixed = jnp.einsum("bkgts,bskd->btkgd", weights, v).reshape(*x.shape[:2], -1)
            x = x + project(mixed, f"{own}.o_proj")
            normed = norm(x, f"{block}.post_attention_layernorm")
            gate = jax.nn.silu(project(normed, f"{block}.mlp.gate_proj"))
            x = x + project(gate * project(normed, f"{block}.mlp.up_proj"), f"{block}.mlp.down_proj")
        return norm(x, "model.norm") @ params["model.embed_tokens.weight"].T

    def _adam(self, state: State, gradient: Params) -> State:
        shape, tree = self._shape, jax.tree.map
        size = jnp.sqrt(sum(jnp.sum(g * g) for g in gradient.values()))
        gradient = tree(lambda g: g * jnp.minimum(1.0, shape.max_norm / size), gradient)
        updates = state.updates + 1
        first = tree(lambda m, g: shape.beta1 * m + (1 - shape.beta1) * g, state.first, gradient)
        second = tree(lambda v, g: shape.beta2 * v + (1 - shape.beta2) * g * g, state.second, gradient)
        one, two = 1 - shape.beta1**updates, 1 - shape.beta2**updates
        params = tree(
            lambda p, m, v: p - shape.rate * (m / one) / (jnp.sqrt(v / two) + shape.adam_eps),
            state.params,
            first,
            second,
        )
        return State(params, first, second, updates)
