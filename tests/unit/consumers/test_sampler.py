"""Sampling: a row's tokens are its own affair, its logprobs are the decoder's, and shapes never change."""

import jax
import numpy as np
import pytest

from consumers.models import decoder
from consumers.models.config import DecoderConfig
from consumers.models.errors import PromptRefused
from consumers.models.sampler import Completion, Sampler, _decode

CONFIG = DecoderConfig(num_hidden_layers=1)
PROMPTS = [[5, 6, 7], [9], [20, 21, 22, 23, 24], [3, 3]]


@pytest.fixture(scope="module")
def params() -> decoder.Params:
    """Sharper than at initialisation, so that greedy and sampled answers differ clearly."""
    made = jax.jit(decoder.init, static_argnums=1)(jax.random.key(3), CONFIG)
    return {**made, decoder.EMBEDDING: made[decoder.EMBEDDING] * 6}


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    return Sampler(CONFIG, row_buckets=(4, 8), max_prompt_length=6, max_new_tokens=10)


def sample(sampler: Sampler, params: decoder.Params, temperature: float = 1.0, seed: int = 100) -> list[Completion]:
    count = len(PROMPTS)
    return sampler.sample(params, PROMPTS, [seed + i for i in range(count)], [temperature] * count, [10] * count, [])


logits_of = jax.jit(decoder.logits, static_argnums=1)


def logits_after(params: decoder.Params, tokens: list[int]) -> np.ndarray:
    """Next-token logits float64 [len(tokens), vocab], by the decoder without a cache, in one compiled shape."""
    padded = np.zeros((1, 16), np.int32)
    padded[0, : len(tokens)] = tokens
    positions = np.arange(16, dtype=np.int32)[None]
    return np.asarray(logits_of(params, CONFIG, padded, positions, np.ones_like(padded)), np.float64)[0, : len(tokens)]


def reference_logprobs(params: decoder.Params, prompt: list[int], tokens: np.ndarray, temperature: float) -> np.ndarray:
    scaled = logits_after(params, [*prompt, *tokens.tolist()])[len(prompt) - 1 : -1] / temperature
    logprobs = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
    return logprobs[np.arange(len(tokens)), tokens]


def test_a_row_does_not_depend_on_the_rows_beside_it(sampler: Sampler, params: decoder.Params) -> None:
    together = sample(sampler, params)
    for row, prompt in enumerate(PROMPTS):
        (alone,) = sampler.sample(params, [prompt], [100 + row], [1.0], [10], [])
        np.testing.assert_array_equal(alone.tokens, together[row].tokens)
        np.testing.assert_array_equal(alone.logprobs, together[row].logprobs)


def test_a_larger_bucket_gives_the_same_tokens(sampler: Sampler, params: decoder.Params) -> None:
    small = sample(sampler, params)
    large = sampler.sample(params, [*PROMPTS, [1], [2]], [100, 101, 102, 103, 7, 8], [1.0] * 6, [10] * 6, [])
    for a, b in zip(small, large, strict=False):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


def test_another_seed_gives_other_tokens_and_high_words_of_seeds_count(
    sampler: Sampler, params: decoder.Params
) -> None:
    answers = {
        tuple(sampler.sample(params, [[5]], [seed], [1.0], [10], [])[0].tokens.tolist())
        for seed in (0, 1, 2**32, 2**40 + 1, 2**63)
    }
    assert len(answers) == 5


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_logprobs_are_those_of_the_sampling_distribution(
    sampler: Sampler, params: decoder.Params, temperature: float
) -> None:
    for prompt, completion in zip(PROMPTS, sample(sampler, params, temperature), strict=True):
        expected = reference_logprobs(params, prompt, completion.tokens, temperature)
        np.testing.assert_allclose(completion.logprobs, expected, atol=2e-5)


def test_greedy_takes_the_likeliest_token_and_reports_it_at_temperature_one(
    sampler: Sampler, params: decoder.Params
) -> None:
    for prompt, completion in zip(PROMPTS, sample(sampler, params, temperature=0.0), strict=True):
        logits = logits_after(params, [*prompt, *completion.tokens.tolist()])[len(prompt) - 1 : -1]
        np.testing.assert_array_equal(completion.tokens, logits.argmax(-1))
        expected = reference_logprobs(params, prompt, completion.tokens, 1.0)
        np.testing.assert_allclose(completion.logprobs, expected, atol=2e-5)


def test_tokens_are_drawn_with_their_probabilities(sampler: Sampler, params: decoder.Params) -> None:
    draws = 4096
    completions = sampler.sample(params, [[5, 9]] * draws, list(range(draws)), [1.0] * draws, [1] * draws, [])
    counts = np.bincount([int(c.tokens[0]) for c in completions], minlength=CONFIG.vocab_size)
    logits = logits_after(params, [5, 9])[-1]
    expected = draws * np.exp(logits) / np.exp(logits).sum()
    common = expected > 5
    chi2 = float((np.square(counts - expected) / expected)[common].sum())
    assert chi2 < common.sum() + 5 * np.sqrt(2 * common.sum())


def test_a_stop_token_ends_a_row_and_is_part_of_it(sampler: Sampler, params: decoder.Params) -> None:
    free = sample(sampler, params)
    stop = int(free[0].tokens[3])
    first = free[0].tokens.tolist().index(stop)
    stopped = sampler.sample(params, PROMPTS, [100, 101, 102, 103], [1.0] * 4, [10] * 4, [stop])
    assert stopped[0].finish_reason == "stop"
    np.testing.assert_array_equal(stopped[0].tokens, free[0].tokens[: first + 1])
    np.testing.assert_array_equal(stopped[0].logprobs, free[0].logprobs[: first + 1])


def test_each_row_keeps_its_own_token_limit(sampler: Sampler, params: decoder.Params) -> None:
    free = sample(sampler, params)
    limited = sampler.sample(params, PROMPTS, [100, 101, 102, 103], [1.0] * 4, [1, 10, 4, 7], [])
    for full, cut, limit in zip(free, limited, [1, 10, 4, 7], strict=True):
        assert cut.finish_reason == "length"
        np.testing.assert_array_equal(cut.tokens, full.tokens[:limit])


def test_more_rows_than_the_largest_bucket_are_sampled_in_parts(sampler: Sampler, params: decoder.Params) -> None:
    prompts = [[2 + i % 50] for i in range(19)]
    many = sampler.sample(params, prompts, list(range(19)), [1.0] * 19, [3] * 19, [])
    for row in (0, 8, 18):
        (alone,) = sampler.sample(params, [prompts[row]], [row], [1.0], [3], [])
        np.testing.assert_array_equal(alone.tokens, many[row].tokens)


def test_nothing_compiles_again_after_the_warm_up(sampler: Sampler, params: decoder.Params) -> None:
    sampler.warm_up(params)
    compiled = _decode._cache_size()
    for rows in (1, 2, 4, 5, 8, 11):
        placed = sampler.place({name: np.asarray(value) for name, value in params.items()})
        sampler.sample(placed, [[1] * (1 + rows % 4)] * rows, [rows] * rows, [0.5] * rows, [2] * rows, [1] * (rows % 3))
    assert _decode._cache_size() == compiled


@pytest.mark.parametrize(
    ("prompt", "limit", "stops", "message"),
    [
        ([], 1, [], "prompt of 0 tokens"),
        ([1] * 7, 1, [], "prompt of 7 tokens"),
        ([1], 11, [], "max_tokens 11"),
        ([1], 0, [], "max_tokens 0"),
        ([1], 1, list(range(9)), "9 stop tokens"),
    ],
)
def test_a_request_that_does_not_fit_is_refused(
    sampler: Sampler, params: decoder.Params, prompt: list[int], limit: int, stops: list[int], message: str
) -> None:
    with pytest.raises(PromptRefused, match=message):
        sampler.sample(params, [prompt], [0], [1.0], [limit], stops)
