"""Decoding in slots: a row's tokens depend on no other row, its logprobs are the decoder's, and shapes never change."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.consumers.models import decoder
from rollstream.consumers.models.config import DecoderConfig
from rollstream.consumers.models.slot_steps import decode_slots, fill_slots
from rollstream.consumers.models.slots import Row, RowTokens, SlotDecoder, cache_bytes, check_devices
from rollstream.consumers.models.tokenizer import PromptRefused
from rollstream.topics.errors import ConfigurationError

CONFIG = DecoderConfig(num_hidden_layers=1)
PROMPTS = [[5, 6, 7], [9], [20, 21, 22, 23, 24], [3, 3]]
LENGTH = 40


@pytest.fixture(scope="module")
def params() -> decoder.Params:
    """Parameters with sharper logits than at initialisation, so that greedy and sampled answers differ clearly."""
    made = jax.jit(decoder.init, static_argnums=1)(jax.random.key(3), CONFIG)
    return {**made, decoder.EMBEDDING: made[decoder.EMBEDDING] * 6}


@pytest.fixture(scope="module")
def shared(params: decoder.Params) -> SlotDecoder:
    made = SlotDecoder(CONFIG, slots=16, max_model_len=LENGTH, steps=3)
    progress: list[str] = []
    made.warm_up(made.place(params), progress.append)
    assert len(progress) == len(set(progress)) > 2, "each shape is announced once"
    return made


@pytest.fixture
def slots(shared: SlotDecoder) -> SlotDecoder:
    """The shared decoder without rows; shapes compiled for one test serve the others."""
    shared.reset()
    return shared


def rows_of(**changes: Any) -> list[Row]:
    return [Row(**{"prompt": prompt, "seed": 100 + i, "max_tokens": 10, **changes}) for i, prompt in enumerate(PROMPTS)]


def finish(slots: SlotDecoder, params: decoder.Params, started: Sequence[int]) -> list[RowTokens]:
    """Decode until the rows in these slots have ended."""
    sequences = {slot: RowTokens(slot, [], [], None, []) for slot in started}
    while any(each.finish_reason is None for each in sequences.values()):
        for new in slots.decode(params):
            if new.slot in sequences:
                so_far = sequences[new.slot]
                sequences[new.slot] = RowTokens(
                    new.slot,
                    so_far.tokens + new.tokens,
                    so_far.logprobs + new.logprobs,
                    new.finish_reason,
                    so_far.kept + new.kept,
                )
    return [sequences[slot] for slot in started]


logits_of = jax.jit(decoder.logits, static_argnums=1)


def logits_after(params: decoder.Params, tokens: Sequence[int]) -> np.ndarray:
    """Next-token logits float64 [len(tokens), vocab], by the decoder without a cache, in one compiled shape."""
    padded = np.zeros((1, LENGTH), np.int32)
    padded[0, : len(tokens)] = tokens
    positions = np.arange(LENGTH, dtype=np.int32)[None]
    return np.asarray(logits_of(params, CONFIG, padded, positions, np.ones_like(padded)), np.float64)[0, : len(tokens)]


def reference_logprobs(
    params: decoder.Params, prompt: Sequence[int], tokens: Sequence[int], temperature: float
) -> np.ndarray:
    scaled = logits_after(params, [*prompt, *tokens])[len(prompt) - 1 : -1] / temperature
    logprobs = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
    return logprobs[np.arange(len(tokens)), tokens]


ALONE: dict[tuple[int, int], list[int]] = {}
"""Tokens of rows that were sampled alone, by prompt and seed."""


@settings(max_examples=15, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(1, 12), st.booleans()), min_size=1, max_size=30
    )
)
def test_rows_that_come_and_go_in_any_order_are_the_rows_they_are_alone(
    shared: SlotDecoder, params: decoder.Params, arrivals: list[tuple[int, int, int, bool]]
) -> None:
    """Each arrival gives a prompt, a seed, a limit, and whether the row is removed again at the next call."""
    shared.reset()
    for prompt, seed, _limit, _removed in arrivals:
        if (prompt, seed) not in ALONE:
            [row] = shared.sample(params, [Row(prompt=PROMPTS[prompt], seed=seed, max_tokens=12)])
            ALONE[prompt, seed] = row.tokens
    decoding: dict[int, tuple[list[int], list[int], bool]] = {}
    waiting = list(arrivals)
    ended = 0
    while waiting or decoding:
        if waiting and shared.free:
            prompt, seed, limit, removed = waiting.pop(0)
            (slot,) = shared.start(params, [Row(prompt=PROMPTS[prompt], seed=seed, max_tokens=limit)])
            assert slot not in decoding
            decoding[slot] = ([], ALONE[prompt, seed][:limit], removed)
        for new in shared.decode(params):
            tokens, expected, removed = decoding[new.slot]
            tokens += new.tokens
            assert tokens == expected[: len(tokens)]
            if new.finish_reason:
                assert tokens == expected
                ended += 1
                del decoding[new.slot]
            elif removed:
                shared.end(new.slot)
                ended += 1
                del decoding[new.slot]
    assert ended == len(arrivals)
    assert shared.free == shared.slots


def test_samples_of_one_prompt_differ_and_share_its_prefill(slots: SlotDecoder, params: decoder.Params) -> None:
    seeds = [*range(13), 2**32, 2**40 + 1, 2**63]
    together = slots.sample(params, [Row(prompt=PROMPTS[2], seed=seed, max_tokens=10) for seed in seeds])
    assert len({tuple(row.tokens) for row in together}) == 16, "high words of seeds count"
    for seed in (0, 15):
        np.testing.assert_allclose(
            together[seed].logprobs, reference_logprobs(params, PROMPTS[2], together[seed].tokens, 1.0), atol=2e-5
        )


def test_a_second_turn_continues_after_the_first(slots: SlotDecoder, params: decoder.Params) -> None:
    (first,) = slots.sample(params, [Row(prompt=[5, 6, 7], seed=1, max_tokens=20)])
    conversation = [5, 6, 7, *first.tokens, 8, 9]
    (second,) = slots.sample(params, [Row(prompt=conversation, seed=2, max_tokens=LENGTH - len(conversation))])
    assert len(conversation) + len(second.tokens) == slots.max_model_len
    np.testing.assert_allclose(second.logprobs, reference_logprobs(params, conversation, second.tokens, 1.0), atol=2e-5)


def test_new_weights_take_over_in_the_middle_of_a_row(slots: SlotDecoder, params: decoder.Params) -> None:
    """The keys and values of earlier tokens stay those of the old weights."""
    other = {**params, decoder.EMBEDDING: params[decoder.EMBEDDING] * 0.9}
    row = rows_of(max_tokens=9)[0]
    (old,) = slots.sample(params, [row])
    (slot,) = slots.start(params, [row])
    (before,) = slots.decode(params)
    (after,) = finish(slots, other, [slot])
    assert before.tokens == old.tokens[:3]
    assert before.logprobs == old.logprobs[:3]
    assert len(after.tokens) == 6
    assert after.logprobs != old.logprobs[3:]


def test_logprobs_are_those_of_the_sampling_distribution(slots: SlotDecoder, params: decoder.Params) -> None:
    temperatures = [1.0, 0.7, 1.6]
    rows = [row for temperature in temperatures for row in rows_of(temperature=temperature)]
    for asked, row in zip(rows, slots.sample(params, rows), strict=True):
        expected = reference_logprobs(params, asked.prompt, row.tokens, asked.temperature)
        np.testing.assert_allclose(row.logprobs, expected, atol=2e-5)


def test_greedy_takes_the_likeliest_token_and_reports_it_at_temperature_one(
    slots: SlotDecoder, params: decoder.Params
) -> None:
    for prompt, row in zip(PROMPTS, slots.sample(params, rows_of(temperature=0.0, top_k=3)), strict=True):
        logits = logits_after(params, [*prompt, *row.tokens])[len(prompt) - 1 : -1]
        np.testing.assert_array_equal(row.tokens, logits.argmax(-1))
        np.testing.assert_allclose(row.logprobs, reference_logprobs(params, prompt, row.tokens, 1.0), atol=2e-5)


def kept_probabilities(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Probabilities after the filters, by their definitions, one token at a time."""
    probabilities = np.exp(logits - logits.max())
    probabilities /= probabilities.sum()
    kept = probabilities >= min_p * probabilities.max()
    order = np.argsort(-probabilities)
    if top_k:
        kept[order[top_k:]] = False
    remaining = np.where(kept, probabilities, 0)
    remaining /= remaining.sum()
    reached = 0.0
    for token in order:
        if reached >= top_p and remaining[token] > 0:
            kept[token] = False
        reached += remaining[token]
    remaining = np.where(kept, probabilities, 0)
    return np.asarray(remaining / remaining.sum())


FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 4},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"top_k": 9, "top_p": 0.8, "min_p": 0.05},
]


def test_tokens_are_drawn_with_their_probabilities_after_the_filters(
    slots: SlotDecoder, params: decoder.Params
) -> None:
    """Rows with each of the filters stand beside each other."""
    draws, logits = 800, logits_after(params, [5, 9])[-1]
    completions = slots.sample(
        params,
        [Row(prompt=[5, 9], seed=seed, max_tokens=1, **filters) for seed in range(draws) for filters in FILTERS],
    )
    for place, filters in enumerate(FILTERS):
        rows = completions[place :: len(FILTERS)]
        counts = np.bincount([row.tokens[0] for row in rows], minlength=CONFIG.vocab_size)
        expected = kept_probabilities(logits, **{"top_k": 0, "top_p": 1.0, "min_p": 0.0, **filters})
        assert counts[expected == 0].sum() == 0, filters
        common = draws * expected > 5
        chi2 = float((np.square(counts - draws * expected)[common] / (draws * expected)[common]).sum())
        assert chi2 < common.sum() + 5 * np.sqrt(2 * common.sum()), filters
        for row in rows[:50]:
            np.testing.assert_allclose(row.logprobs, np.log(expected[row.tokens]), atol=2e-5)


def test_a_stop_token_ends_a_row_and_is_part_of_it(slots: SlotDecoder, params: decoder.Params) -> None:
    free = slots.sample(params, rows_of())[0]
    stop = free.tokens[3]
    first = free.tokens.index(stop)
    stopped = slots.sample(params, rows_of(stop_ids=(CONFIG.vocab_size - 1, stop)))[0]
    assert stopped.finish_reason == "stop"
    assert stopped.tokens == free.tokens[: first + 1]
    assert stopped.logprobs == free.logprobs[: first + 1]


def test_nothing_compiles_again_after_the_warm_up(slots: SlotDecoder, params: decoder.Params) -> None:
    compiled = decode_slots._cache_size(), fill_slots._cache_size()
    for count in (1, 2, 15, 20, 30):
        placed = slots.place({name: np.asarray(value) for name, value in params.items()})
        slots.sample(
            placed,
            [
                Row(prompt=[i] * (1 + i % 20), seed=i, max_tokens=1 + i % 4, temperature=0.5, stop_ids=[1])
                for i in range(count)
            ],
        )
    assert (decode_slots._cache_size(), fill_slots._cache_size()) == compiled


def test_in_bfloat16_logprobs_are_near_those_in_float32(params: decoder.Params) -> None:
    slots = SlotDecoder(CONFIG, slots=4, max_model_len=16, dtype="bfloat16", steps=3)
    placed = slots.place(params)
    assert {array.dtype.name for array in placed.values()} == {"bfloat16"}
    for prompt, row in zip(PROMPTS, slots.sample(placed, rows_of()), strict=True):
        expected = reference_logprobs(params, prompt, row.tokens, 1.0)
        np.testing.assert_allclose(row.logprobs, expected, atol=0.3)
        assert np.abs(np.asarray(row.logprobs) - expected).mean() < 0.05


def test_the_cache_has_the_size_it_reports(slots: SlotDecoder) -> None:
    cache = decoder.empty_cache(CONFIG, 16, LENGTH, np.dtype(np.float32))
    assert slots.cache_bytes == sum(array.nbytes for array in jax.tree.leaves(cache))
    assert cache_bytes(CONFIG, 16, LENGTH, "bfloat16") == slots.cache_bytes // 2


def test_more_devices_than_there_are_or_than_share_the_slots_equally_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"inference\.devices 64 \(of 1 available\) .*than are available"):
        SlotDecoder(CONFIG, slots=64, max_model_len=LENGTH, devices=64)
    with pytest.raises(ConfigurationError, match=r"20 slots .* 8 groups .*inference\.max_rows to a multiple"):
        check_devices(CONFIG, slots=20, devices=8, tensor_parallel=1, local=8)


def test_devices_that_cannot_share_the_model_are_refused() -> None:
    two_heads = DecoderConfig(num_attention_heads=4, num_key_value_heads=2)
    with pytest.raises(ConfigurationError, match=r"2 key and value heads .* 4 devices: set inference\.tensor_parallel"):
        check_devices(two_heads, slots=16, devices=4, tensor_parallel=4, local=4)
    with pytest.raises(ConfigurationError, match=r"inference\.devices 3 \(of 4 available\) .*tensor_parallel 2"):
        check_devices(two_heads, slots=18, devices=3, tensor_parallel=2, local=4)
    check_devices(two_heads, slots=16, devices=4, tensor_parallel=2, local=4)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (Row(prompt=[], seed=0, max_tokens=1), "prompt of 0 tokens"),
        (Row(prompt=[1] * LENGTH, seed=0, max_tokens=1), f"prompt of {LENGTH} tokens"),
        (Row(prompt=[1] * 6, seed=0, max_tokens=LENGTH - 5), r"max_tokens 35.*inference\.max_model_len"),
        (Row(prompt=[1], seed=0, max_tokens=0), "max_tokens 0"),
        (Row(prompt=[1], seed=0, max_tokens=1, stop_ids=range(41)), "41 stop tokens"),
    ],
)
def test_a_row_that_does_not_fit_is_refused_and_none_beside_it_is_started(
    slots: SlotDecoder, params: decoder.Params, row: Row, message: str
) -> None:
    with pytest.raises(PromptRefused, match=message):
        slots.start(params, [*rows_of(), row])
    assert slots.free == slots.slots


class _OddOrEven:
    """Allows odd tokens below 64 after even ones, and even ones after odd ones."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def allowed(self) -> np.ndarray:
        odd = not self.accepted or self.accepted[-1] % 2 == 0
        return np.full(2, 0xAAAAAAAA if odd else 0x55555555, np.uint32)

    def accept(self, token: int) -> None:
        self.accepted.append(token)


@pytest.mark.parametrize("temperature", [0.0, 0.5])
@pytest.mark.parametrize("top_k", [0, 1])
def test_a_row_with_a_mask_is_drawn_from_the_allowed_tokens_and_other_rows_are_as_without_it(
    slots: SlotDecoder, params: decoder.Params, temperature: float, top_k: int
) -> None:
    mask = _OddOrEven()
    rows = rows_of(temperature=temperature, top_k=top_k)
    alone = finish(slots, params, slots.start(params, rows))
    masked = Row(prompt=PROMPTS[0], seed=7, max_tokens=10, temperature=temperature, top_k=top_k, mask=mask)
    started = slots.start(params, [masked, *rows])
    constrained, *others = finish(slots, params, started)
    assert [(row.tokens, row.finish_reason) for row in others] == [(row.tokens, row.finish_reason) for row in alone]
    assert [token % 2 for token in constrained.tokens] == [1, 0] * 5
    assert mask.accepted == constrained.tokens[:-1]
    scaled = logits_after(params, [*PROMPTS[0], *constrained.tokens])[len(PROMPTS[0]) - 1 : -1] / (temperature or 1.0)
    parity = np.arange(scaled.shape[1]) % 2 == (1 - np.arange(10) % 2)[:, None]
    scaled[~(parity & (np.arange(scaled.shape[1]) < 64))] = -np.inf
    if not temperature or top_k:
        assert constrained.tokens == scaled.argmax(-1).tolist()
    expected = scaled[np.arange(10), constrained.tokens] - np.log(np.exp(scaled).sum(-1))
    if temperature and top_k:
        expected[:] = 0
    np.testing.assert_allclose(constrained.logprobs, expected, atol=1e-4)
    assert finish(slots, params, slots.start(params, rows))[0].tokens == alone[0].tokens, "its slot has no mask"
