"""Decoding in slots: each row has a slot of the cache of keys and values, and joins or leaves while other rows decode.

Shapes are fixed, so nothing compiles again in steady state. A row's tokens depend on its prompt, its seed, its
parameters and the weights, and on the other rows only by rounding.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from numpy.typing import NDArray

from rollstream.consumers.models.adapters import merged, without_adapters
from rollstream.consumers.models.config import DecoderConfig, expert_dtype
from rollstream.consumers.models.decoder import Params, pspecs
from rollstream.consumers.models.slot_steps import (
    AXIS,
    TENSOR,
    SamplingArrays,
    SlotTable,
    SlotTokens,
    decode_slots,
    empty_slots,
    experts_in_slot,
    fill_slots,
)
from rollstream.consumers.models.tokenizer import PromptRefused
from rollstream.topics.errors import ConfigurationError

MAX_STOP_IDS = 40
_PROMPTS = 8
"""Number of prompts in one prefill on each group of devices."""
_SMALLEST_BUCKET = 16
"""Smallest number of slots, prompt tokens or positions that is compiled."""

FinishReason = Literal["stop", "length"]
_Prompts = list[tuple[tuple[int, ...], list[int]]]
"""Prompts without their last tokens, each with the slots of its rows."""


class TokenMask(Protocol):
    """The tokens that may come next in one row. While a row has a mask, all rows decode one token at a call."""

    def allowed(self) -> NDArray[np.uint32]:
        """A bit for each token that may come next, the lowest first, in words of 32; tokens beyond may not."""

    def accept(self, token: int) -> None:
        """Note the next token, which is one of the allowed."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A sequence to sample after a prompt."""

    prompt: Sequence[int]
    seed: int
    """Taken modulo 2**64."""
    max_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_ids: Sequence[int] = ()
    """Tokens that end the row; the result includes the stop token."""
    mask: "TokenMask | None" = None
    """Constraint on the row's tokens."""


class RowTokens(NamedTuple):
    """Tokens sampled for one row."""

    slot: int
    tokens: list[int]
    """Token ids, including the stop token, if any."""
    logprobs: list[float]
    """Log-probabilities of the tokens under the sampling distribution; for a greedy row, at temperature 1."""
    finish_reason: FinishReason | None
    """Reason why the row ended and left its slot; None while the row continues."""
    kept: list[list[int]]
    """The tokens among which each of `tokens` was drawn, the likeliest first; empty if the row has no filter."""


def cache_bytes(config: DecoderConfig, slots: int, max_model_len: int, dtype: str) -> int:
    """Size of a cache of keys and values, and of the numbers of experts."""
    values = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * jnp.dtype(dtype).itemsize
    experts = config.num_hidden_layers * config.num_experts_per_tok * np.dtype(expert_dtype(config)).itemsize
    return slots * max_model_len * (values + experts)


class SlotDecoder:
    """Decodes up to `slots` rows side by side. Not thread-safe.

    Rows that start together with the same prompt share one prefill in each group of devices. Each group of
    `tensor_parallel` devices holds the parameters, split among its devices, and an equal share of the slots. Random
    bits come from threefry with the row's seed and the position in the answer, whatever the other rows are. With other
    shapes, which follow the slots and the positions in use, or another split over devices, the arithmetic may round the
    last bit differently.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        slots: int,
        max_model_len: int,
        dtype: str = "float32",
        devices: int = 1,
        tensor_parallel: int = 1,
        steps: int = 8,
    ) -> None:
        """Each call of `decode` samples up to `steps` tokens of each row. `devices` is the number of devices; 0: all.

        Raises ConfigurationError if there are fewer devices, or if they cannot share the model or the slots equally.
        """
        local = jax.local_devices()
        devices = devices or len(local)
        check_devices(config, slots=slots, devices=devices, tensor_parallel=tensor_parallel, local=len(local))
        self.published, config = config, without_adapters(config)
        """The model as published, with its adapters."""
        self.config = config
        """The model that is computed, with adapters merged."""
        self.slots = slots
        self.max_model_len = max_model_len
        self.cache_bytes = cache_bytes(config, slots, max_model_len, dtype)
        self._steps = steps
        self._dtype = jnp.dtype(dtype)
        self._groups = devices // tensor_parallel
        # Neighbours in JAX's order are the closest; the devices of a group exchange activations in every layer.
        self._mesh = Mesh(np.array(local[:devices]).reshape(self._groups, tensor_parallel), (AXIS, TENSOR))
        self._slots_each = slots // self._groups
        self._row_buckets = _buckets(self._slots_each)
        self._length_buckets = _buckets(max_model_len)
        self.reset()

    def reset(self) -> None:
        """Remove all rows."""
        self._cache = empty_slots(self.config, self._mesh, self._slots_each, self.max_model_len, self._dtype.name)
        self._free = [list(range(self._slots_each)) for _ in range(self._groups)]
        self._masks: dict[int, TokenMask] = {}
        """Masks of rows, by slot."""
        self._table: SlotTable[NDArray[Any]] = SlotTable(
            tokens=np.zeros(self.slots, np.int32),
            positions=np.zeros(self.slots, np.int32),
            indices=np.zeros(self.slots, np.int32),
            remaining=np.zeros(self.slots, np.int32),
            stop_ids=np.full((self.slots, MAX_STOP_IDS), -1, np.int32),
            sampling=SamplingArrays(
                seeds=np.zeros((self.slots, 2), np.uint32),
                temperatures=np.ones(self.slots, np.float32),
                top_k=np.zeros(self.slots, np.int32),
                top_p=np.ones(self.slots, np.float32),
                min_p=np.zeros(self.slots, np.float32),
            ),
        )

    @property
    def free(self) -> int:
        """Number of slots without a row."""
        return sum(map(len, self._free))

    def place(self, arrays: Mapping[str, NDArray[np.generic] | jax.Array]) -> Params:
        """Put the tensors of a version on the devices once, with adapters merged, in the decoder's dtype."""
        arrays = merged(self.published, arrays)
        specs = pspecs(arrays, {TENSOR: self._mesh.shape[TENSOR]})
        return {
            name: jax.device_put(array.astype(self._dtype, copy=False), NamedSharding(self._mesh, specs[name]))
            for name, array in arrays.items()
        }

    def warm_up(self, params: Params, on_progress: Callable[[str], object] = lambda _progress: None) -> None:
        """Compile every shape now instead of at its first use; filters are compiled when a row first uses them.

        `on_progress` is called before each length and number of rows, which take seconds each.
        """
        for length in self._length_buckets:
            on_progress(f"compiling prompts of {length} tokens")
            self._prefill(params, length, [[((0,), [])] for _ in range(self._groups)])
            for rows in self._row_buckets:
                on_progress(f"compiling {rows} rows of {length} tokens")
                self._decode(params, rows, length, filtering=False)

    def start(self, params: Params, rows: Sequence[Row]) -> list[int]:
        """Give each row a slot and prefill its prompt; return the slots.

        Raises PromptRefused, and starts no row, if a row does not fit. There must be a free slot for every row.
        """
        for row in rows:
            self._check(row)
        slots = []
        shared: list[dict[tuple[int, ...], list[int]]] = [defaultdict(list) for _ in self._free]
        for row in rows:
            group = max(range(len(self._free)), key=lambda group: len(self._free[group]))
            place = heapq.heappop(self._free[group])
            slots.append(group * self._slots_each + place)
            # `decode` begins with the last token of the prompt.
            if len(row.prompt) > 1:
                shared[group][tuple(row.prompt[:-1])].append(place)
        self._enter(rows, slots)
        by_length: dict[int, list[_Prompts]] = defaultdict(lambda: [[] for _ in self._free])
        for group, prompts in enumerate(shared):
            for prompt, places in prompts.items():
                by_length[_fitting(self._length_buckets, len(prompt))][group].append((prompt, places))
        for length, each in by_length.items():
            for first in range(0, max(map(len, each)), _PROMPTS):
                self._prefill(params, length, [prompts[first : first + _PROMPTS] for prompts in each])
        return slots

    def end(self, slot: int) -> None:
        """Remove the row in a slot before it has ended."""
        self._table.remaining[slot] = 0
        self._masks.pop(slot, None)
        heapq.heappush(self._free[slot // self._slots_each], slot % self._slots_each)

    def routed_experts(self, slot: int, length: int) -> NDArray[Any] | None:
        """Return the numbers [length, layers, num_experts_per_tok] of the experts that computed the first `length`
        positions of the row in a slot, or of the row that ended there last; None for a model without experts.

        A token is computed when the next one is sampled, so a row that ended has one position less than tokens.
        """
        if not self.config.num_experts:
            return None
        return np.asarray(experts_in_slot(self._cache, slot))[:length]

    def decode(self, params: Params) -> list[RowTokens]:
        """Sample up to `steps` tokens of every row; rows that end leave their slots."""
        table, each = self._table, self._slots_each
        (active,) = np.nonzero(table.remaining)
        if not active.size:
            return []
        rows = _fitting(self._row_buckets, int((active % each).max()) + 1)
        furthest = min(int(table.positions[active].max()) + self._steps, self.max_model_len)
        sampling = table.sampling
        filtering = bool(
            np.any((sampling.top_k[active] > 0) | (sampling.top_p[active] < 1) | (sampling.min_p[active] > 0))
        )
        allowed = self._allowed()
        context = _fitting(self._length_buckets, furthest)
        sampled = self._decode(params, rows, context, filtering=filtering, allowed=allowed)
        places = active // each * rows + active % each
        tokens, logprobs, counts, kept, kept_counts = (np.asarray(array)[places] for array in sampled)
        last = tokens[np.arange(active.size), counts - 1]
        table.tokens[active] = last
        table.positions[active] += counts
        table.indices[active] += counts
        table.remaining[active] -= counts
        stopped = (last[:, None] == table.stop_ids[active]).any(axis=1)
        spent = table.remaining[active] == 0
        results = []
        for row, (slot, count, ids, values, stop, end) in enumerate(
            zip(*(array.tolist() for array in (active, counts, tokens, logprobs, stopped, spent)), strict=True)
        ):
            reason: FinishReason | None = "stop" if stop else "length" if end else None
            among = []
            if filtering:
                numbers = kept_counts[row, :count].tolist()
                among = [
                    each[:number].tolist() for each, number in zip(kept[row, :count], numbers, strict=True) if number
                ]
            results.append(RowTokens(slot, ids[:count], values[:count], reason, among))
            if reason:
                self.end(slot)
            elif slot in self._masks:
                self._masks[slot].accept(ids[0])
        return results

    def _allowed(self) -> NDArray[np.uint32] | None:
        """Bits of the tokens that may come next in each slot, uint32 [slots, words]; None if no row has a mask."""
        if not self._masks:
            return None
        allowed = np.full((self.slots, -(-self.config.vocab_size // 32)), 0xFFFFFFFF, np.uint32)
        for slot, mask in self._masks.items():
            words = mask.allowed()[: allowed.shape[1]]
            allowed[slot] = 0
            allowed[slot, : len(words)] = words
        return allowed

    def sample(self, params: Params, rows: Sequence[Row]) -> list[RowTokens]:
        """Sample rows until they end, as many at a time as there are slots. All slots must be free at the call."""
        finished: list[RowTokens] = [RowTokens(-1, [], [], None, []) for _ in rows]
        waiting, in_slots = list(range(len(rows)))[::-1], dict[int, int]()
        while waiting or in_slots:
            if starting := [waiting.pop() for _ in range(min(self.free, len(waiting)))]:
                in_slots.update(zip(self.start(params, [rows[index] for index in starting]), starting, strict=True))
            for decoded in self.decode(params):
                so_far = finished[in_slots[decoded.slot]]
                so_far.tokens.extend(decoded.tokens)
                so_far.logprobs.extend(decoded.logprobs)
                so_far.kept.extend(decoded.kept)
                if decoded.finish_reason:
                    index = in_slots.pop(decoded.slot)
                    finished[index] = so_far._replace(slot=decoded.slot, finish_reason=decoded.finish_reason)
        return finished

    def _check(self, row: Row) -> None:
        if not row.prompt or row.max_tokens < 1:
            raise PromptRefused(
                f"prompt of {len(row.prompt)} tokens and max_tokens {row.max_tokens}; both must be at least 1"
            )
        if len(row.prompt) + row.max_tokens > self.max_model_len:
            raise PromptRefused(
                f"prompt of {len(row.prompt)} tokens and max_tokens {row.max_tokens}; together at most "
                f"{self.max_model_len} fit: shorten them or raise inference.max_model_len"
            )
        if len(row.stop_ids) > MAX_STOP_IDS:
            raise PromptRefused(f"{len(row.stop_ids)} stop tokens; at most {MAX_STOP_IDS} are supported")

    def _enter(self, rows: Sequence[Row], slots: list[int]) -> None:
        """Write the rows into their slots of the table."""
        table, sampling = self._table, self._table.sampling
        self._masks |= {slot: row.mask for slot, row in zip(slots, rows, strict=True) if row.mask is not None}
        table.tokens[slots] = [row.prompt[-1] for row in rows]
        table.positions[slots] = [len(row.prompt) - 1 for row in rows]
        table.indices[slots] = 0
        table.remaining[slots] = [row.max_tokens for row in rows]
        table.stop_ids[slots] = [(*row.stop_ids, *[-1] * (MAX_STOP_IDS - len(row.stop_ids))) for row in rows]
        sampling.seeds[slots] = [((row.seed >> 32) & 0xFFFFFFFF, row.seed & 0xFFFFFFFF) for row in rows]
        sampling.temperatures[slots] = [row.temperature for row in rows]
        sampling.top_k[slots] = [row.top_k for row in rows]
        sampling.top_p[slots] = [row.top_p for row in rows]
        sampling.min_p[slots] = [row.min_p for row in rows]

    def _prefill(self, params: Params, length: int, prompts: Sequence[_Prompts]) -> None:
        """Run some prompts on each group of devices, and copy the keys and values to the slots of the prompts' rows."""
        groups = len(prompts)
        tokens = np.zeros((groups, _PROMPTS, length), np.int32)
        sources = np.zeros((groups, self._slots_each), np.int32)
        targets = np.zeros((groups, self._slots_each), np.int32)
        counts = np.zeros(groups, np.int32)
        for group, each in enumerate(prompts):
            copies = [(source, place) for source, (_prompt, places) in enumerate(each) for place in places]
            counts[group] = len(copies)
            for source, (prompt, _places) in enumerate(each):
                tokens[group, source, : len(prompt)] = prompt
            if copies:
                sources[group, : len(copies)], targets[group, : len(copies)] = zip(*copies, strict=True)
        self._cache = fill_slots(
            params,
            self._cache,
            tokens.reshape(-1, length),
            sources.reshape(-1),
            targets.reshape(-1),
            counts,
            config=self.config,
            mesh=self._mesh,
        )

    def _decode(
        self,
        params: Params,
        rows: int,
        context: int,
        *,
        filtering: bool,
        allowed: NDArray[np.uint32] | None = None,
    ) -> SlotTokens:
        """Decode in the first `rows` slots of each group of devices; one step if some tokens only are allowed."""

        def first(array: NDArray[np.generic]) -> NDArray[np.generic]:
            each = array.reshape(self._groups, self._slots_each, *array.shape[1:])[:, :rows]
            return each.reshape(-1, *array.shape[1:])

        self._cache, sampled = decode_slots(
            params,
            self._cache,
            jax.tree.map(first, self._table),
            None if allowed is None else first(allowed),
            config=self.config,
            mesh=self._mesh,
            context=context,
            steps=self._steps if allowed is None else 1,
            filtering=filtering,
        )
        decoded: SlotTokens = sampled
        return decoded


def check_devices(config: DecoderConfig, *, slots: int, devices: int, tensor_parallel: int, local: int) -> None:
    """Raise ConfigurationError if `devices` of the `local` devices cannot share the model, or the slots equally."""
    if config.num_key_value_heads % tensor_parallel:
        raise ConfigurationError(
            f"{config.num_key_value_heads} key and value heads of the model cannot be split over {tensor_parallel} "
            "devices: set inference.tensor_parallel to a divisor of the heads (num_key_value_heads)"
        )
    if devices > local or devices % tensor_parallel:
        raise ConfigurationError(
            f"inference.devices {devices} (of {local} available) cannot form groups of inference.tensor_parallel "
            f"{tensor_parallel}: set inference.devices to a multiple of it, and to no more than are available"
        )
    if slots % (devices // tensor_parallel):
        raise ConfigurationError(
            f"{slots} slots cannot be shared equally by {devices // tensor_parallel} groups of devices: set "
            "inference.max_rows to a multiple of inference.devices / inference.tensor_parallel"
        )


def _buckets(largest: int) -> list[int]:
    """Sizes from the smallest bucket on, each four times the previous size, while below `largest`; then `largest`."""
    buckets, bucket = [], _SMALLEST_BUCKET
    while bucket < largest:
        buckets.append(bucket)
        bucket *= 4
    return [*buckets, largest]


def _fitting(buckets: Sequence[int], least: int) -> int:
    """The smallest bucket whose size is at least `least`."""
    return next(bucket for bucket in buckets if bucket >= least)
