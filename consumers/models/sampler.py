"""Batched decoding for the embedded inference server: fixed shapes, so nothing compiles again in steady state.

A row's tokens depend on its prompt, its seed and the parameters, not on the rows beside it. Results are numpy arrays.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from consumers.models.config import DecoderConfig
from consumers.models.decoder import KeyValueCache, Params, decode_step, prefill
from consumers.models.errors import PromptRefused

MAX_STOP_IDS = 8


@dataclass(frozen=True)
class Completion:
    """What was sampled after one prompt."""

    tokens: NDArray[np.int32]
    """Sampled token ids, the stop token included when there was one."""
    logprobs: NDArray[np.float32]
    """Their log-probabilities at the sampling temperature (at temperature 1 when greedy)."""
    finish_reason: Literal["stop", "length"]
    """Whether a stop token ended it or the token limit."""


class Sampler:
    """Decodes batches of prompts in the smallest of a few row counts that holds them.

    A fixed seed gives the same tokens in any company: random bits are threefry's, counted from the row's seed and the
    position in the completion. Across row counts the arithmetic may round differently in the last bit.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        row_buckets: Sequence[int] = (16, 64, 256),
        max_prompt_length: int = 32,
        max_new_tokens: int = 32,
    ) -> None:
        self.config = config
        self.row_buckets = sorted(row_buckets)
        self.max_prompt_length = max_prompt_length
        self.max_new_tokens = max_new_tokens

    def place(self, arrays: Mapping[str, NDArray[np.generic]]) -> Params:
        """Put a version's tensors on the device once, for all calls of `sample` that use it."""
        return {name: jax.device_put(array) for name, array in arrays.items()}

    def warm_up(self, params: Params) -> None:
        """Compile every row count now rather than at the first request of that size."""
        for rows in self.row_buckets:
            self.sample(params, [[0]] * rows, [0] * rows, [1.0] * rows, [1] * rows, [])

    def sample(
        self,
        params: Params,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        temperatures: Sequence[float],
        max_tokens: Sequence[int],
        stop_ids: Sequence[int],
    ) -> list[Completion]:
        """Complete every prompt; the last four arguments but `stop_ids` hold one entry per prompt.

        Seeds are taken modulo 2**64. Temperature 0 is greedy. A row ends after `max_tokens` of its own or with the
        first of `stop_ids`, whichever comes first. Raises PromptRefused where a prompt is empty or too long for the
        shapes the sampler was built with.
        """
        self._check(prompts, max_tokens, stop_ids)
        largest = self.row_buckets[-1]
        completions: list[Completion] = []
        for start in range(0, len(prompts), largest):
            part = slice(start, start + largest)
            completions += self._sample_bucket(
                params, prompts[part], seeds[part], temperatures[part], max_tokens[part], stop_ids
            )
        return completions

    def _check(self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], stop_ids: Sequence[int]) -> None:
        for prompt, limit in zip(prompts, max_tokens, strict=True):
            if not 0 < len(prompt) <= self.max_prompt_length:
                raise PromptRefused(
                    f"prompt of {len(prompt)} tokens; this sampler takes 1 to {self.max_prompt_length}: "
                    "shorten it or raise max_prompt_length"
                )
            if not 0 < limit <= self.max_new_tokens:
                raise PromptRefused(
                    f"max_tokens {limit}; this sampler gives 1 to {self.max_new_tokens}: "
                    "lower it or raise max_new_tokens"
                )
        if len(stop_ids) > MAX_STOP_IDS:
            raise PromptRefused(f"{len(stop_ids)} stop tokens; at most {MAX_STOP_IDS} are supported")

    def _sample_bucket(
        self,
        params: Params,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        temperatures: Sequence[float],
        max_tokens: Sequence[int],
        stop_ids: Sequence[int],
    ) -> list[Completion]:
        count = len(prompts)
        rows = next(bucket for bucket in self.row_buckets if bucket >= count)
        tokens = np.zeros((rows, self.max_prompt_length), np.int32)
        lengths = np.ones(rows, np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
            lengths[row] = len(prompt)
        seed_words = np.zeros((rows, 2), np.uint32)
        seed_words[:count] = [((seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF) for seed in map(int, seeds)]
        row_temperatures = np.ones(rows, np.float32)
        row_temperatures[:count] = temperatures
        limits = np.zeros(rows, np.int32)
        limits[:count] = max_tokens
        stops = np.full(MAX_STOP_IDS, -1, np.int32)
        stops[: len(stop_ids)] = stop_ids
        final: _Decoding = jax.device_get(
            _decode(
                params, self.config, self.max_new_tokens, tokens, lengths, seed_words, row_temperatures, limits, stops
            )
        )
        return [
            Completion(
                final.tokens[row, : final.produced[row]].copy(),  # type: ignore[arg-type]
                final.logprobs[row, : final.produced[row]].copy(),  # type: ignore[arg-type]
                "stop" if final.stopped[row] else "length",
            )
            for row in range(count)
        ]


class _Decoding(NamedTuple):
    """What the decoding loop carries; B rows, N the token limit of the shapes."""

    decoded: jax.Array
    """int32: tokens decoded so far, the same for all rows."""
    active: jax.Array
    """bool [B]: rows that go on."""
    tokens: jax.Array
    """int32 [B, N]; rubbish behind a row's end."""
    logprobs: jax.Array
    """float32 [B, N]; rubbish behind a row's end."""
    produced: jax.Array
    """int32 [B]: tokens that belong to the row."""
    stopped: jax.Array
    """bool [B]: rows ended by a stop token."""


@partial(jax.jit, static_argnames=("config", "max_new_tokens"))
def _decode(
    params: Params,
    config: DecoderConfig,
    max_new_tokens: int,
    prompts: jax.Array,
    lengths: jax.Array,
    seed_words: jax.Array,
    temperatures: jax.Array,
    limits: jax.Array,
    stop_ids: jax.Array,
) -> _Decoding:
    """Prefill, then one token per iteration until every row is done.

    `prompts` int32 [B, P], `lengths` and `limits` int32 [B], `seed_words` uint32 [B, 2], `temperatures` float32 [B].
    """
    rows, prompt_length = prompts.shape
    keys = jax.random.wrap_key_data(seed_words, impl="threefry2x32")
    greedy = temperatures == 0.0
    divisors = jnp.where(greedy, 1.0, temperatures)[:, None]

    def take(state: _Decoding, logits: jax.Array) -> _Decoding:
        """Choose a token for every row: the largest of logits plus Gumbel noise is a draw from their softmax."""
        scaled = logits / divisors
        step_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, state.decoded)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, (config.vocab_size,)))(step_keys)
        token = jnp.argmax(jnp.where(greedy[:, None], scaled, scaled + noise), axis=-1).astype(jnp.int32)
        logprob = jnp.take_along_axis(jax.nn.log_softmax(scaled), token[:, None], axis=-1)[:, 0]
        ended = state.active & jnp.any(token[:, None] == stop_ids, axis=-1)
        return _Decoding(
            decoded=state.decoded + 1,
            active=state.active & ~ended & (state.decoded + 1 < limits),
            tokens=state.tokens.at[:, state.decoded].set(token),
            logprobs=state.logprobs.at[:, state.decoded].set(logprob),
            produced=state.produced + state.active,
            stopped=state.stopped | ended,
        )

    def unfinished(carry: tuple[_Decoding, KeyValueCache]) -> jax.Array:
        return (carry[0].decoded < max_new_tokens) & jnp.any(carry[0].active)

    def advance(carry: tuple[_Decoding, KeyValueCache]) -> tuple[_Decoding, KeyValueCache]:
        state, cache = carry
        last = state.decoded - 1
        logits, cache = decode_step(params, config, cache, state.tokens[:, last], lengths + last)
        return take(state, logits), cache

    logits, cache = prefill(params, config, prompts, lengths, prompt_length + max_new_tokens)
    start = _Decoding(
        decoded=jnp.zeros((), jnp.int32),
        active=limits > 0,
        tokens=jnp.zeros((rows, max_new_tokens), jnp.int32),
        logprobs=jnp.zeros((rows, max_new_tokens), jnp.float32),
        produced=jnp.zeros(rows, jnp.int32),
        stopped=jnp.zeros(rows, bool),
    )
    return jax.lax.while_loop(unfinished, advance, (take(start, logits), cache))[0]
