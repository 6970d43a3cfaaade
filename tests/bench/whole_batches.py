"""Baseline of the decode rows: gather what has arrived, decode it to the end of its longest row, and gather again."""

import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rollstream.consumers.models.config import DecoderConfig
from rollstream.consumers.models.decoder import KeyValueCache, Params, decode_step, final_logits, prefill
from rollstream.consumers.models.slot_steps import SamplingArrays, choose


class TimedRequest(NamedTuple):
    """One prompt, and when it arrives."""

    prompt: list[int]
    seed: int
    max_tokens: int
    arrives_s: float = 0.0


class BatchDecoder:
    """Decodes prompts of at most `prompt_length` tokens in batches of `buckets` rows."""

    def __init__(self, config: DecoderConfig, buckets: Sequence[int], prompt_length: int, max_tokens: int) -> None:
        self.config = config
        self._buckets = sorted(buckets)
        self._prompt_length = prompt_length
        self._max_tokens = max_tokens

    def serve(self, params: Params, requests: Sequence[TimedRequest]) -> int:
        """Answer all requests, in the order of arrival; return the number of tokens."""
        began, waiting, sampled = time.perf_counter(), list(requests), 0
        while waiting:
            late_s = waiting[0].arrives_s - (time.perf_counter() - began)
            if late_s > 0:
                time.sleep(late_s)
            now_s = time.perf_counter() - began
            arrived = [each for each in waiting[: self._buckets[-1]] if each.arrives_s <= now_s]
            del waiting[: len(arrived)]
            sampled += self.decode(params, arrived)
        return sampled

    def decode(self, params: Params, requests: Sequence[TimedRequest]) -> int:
        """Decode one batch; return the number of tokens."""
        rows = next(bucket for bucket in self._buckets if bucket >= len(requests))
        prompts = np.zeros((rows, self._prompt_length), np.int32)
        lengths, limits = np.ones(rows, np.int32), np.zeros(rows, np.int32)
        seeds = np.zeros((rows, 2), np.uint32)
        for row, request in enumerate(requests):
            prompts[row, : len(request.prompt)] = request.prompt
            lengths[row], limits[row], seeds[row, 1] = len(request.prompt), request.max_tokens, request.seed
        tokens, _logprobs = jax.device_get(
            _decode(params, self.config, self._max_tokens, prompts, lengths, seeds, limits)
        )
        assert tokens.shape == (rows, self._max_tokens)
        return sum(request.max_tokens for request in requests)


@partial(jax.jit, static_argnames=("config", "max_tokens"))
def _decode(
    params: Params,
    config: DecoderConfig,
    max_tokens: int,
    prompts: jax.Array,
    lengths: jax.Array,
    seeds: jax.Array,
    limits: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    rows = prompts.shape[0]
    sampling = SamplingArrays(
        seeds=seeds,
        temperatures=jnp.ones(rows),
        top_k=jnp.zeros(rows, jnp.int32),
        top_p=jnp.ones(rows),
        min_p=jnp.zeros(rows),
    )
    states, cache = prefill(params, config, prompts)
    cache = jax.tree.map(lambda array: jnp.pad(array, ((0, 0), (0, max_tokens), (0, 0), (0, 0))), cache)
    first = final_logits(params, config, states[jnp.arange(rows), lengths - 1])

    class State(NamedTuple):
        step: jax.Array
        tokens: jax.Array
        logprobs: jax.Array
        cache: KeyValueCache

    def take(state: State, logits: jax.Array) -> State:
        choice = choose(logits, sampling, jnp.full(rows, state.step), filtering=False)
        return state._replace(
            step=state.step + 1,
            tokens=state.tokens.at[:, state.step].set(choice.tokens),
            logprobs=state.logprobs.at[:, state.step].set(choice.logprobs),
        )

    def advance(state: State) -> State:
        last = state.step - 1
        logits, cache = decode_step(params, config, state.cache, state.tokens[:, last], lengths + last)
        return take(state._replace(cache=cache), logits)

    start = State(
        jnp.zeros((), jnp.int32), jnp.zeros((rows, max_tokens), jnp.int32), jnp.zeros((rows, max_tokens)), cache
    )
    final = jax.lax.while_loop(lambda state: state.step < jnp.max(limits), advance, take(start, first))
    return final.tokens, final.logprobs
