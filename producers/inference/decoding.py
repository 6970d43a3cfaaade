"""Requests to an engine, their rows, the sequences it returns, and the generator it runs."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rollstream.topics.errors import RollstreamError

FinishReason = Literal["stop", "length"]


class NotReady(RollstreamError):
    """No weights have arrived yet, or the engine has stopped."""


class PolicySpan(NamedTuple):
    """A run of tokens that one policy version sampled."""

    version: int
    start: int
    """Index of the first token, counted from the start of the answer."""
    stop: int
    """Index after the last token."""


class SampledSequence(NamedTuple):
    """A sequence sampled after one prompt."""

    tokens: Sequence[int]
    """Token ids, including the end token if there is one."""
    logprobs: Sequence[float]
    """Log-probabilities of `tokens` under the distribution sampled from."""
    finish_reason: FinishReason
    spans: Sequence[PolicySpan] = ()
    """Policy versions of all tokens, in order and without gaps."""
    routed_experts: NDArray[Any] | None = None
    """Experts [prompt + tokens - 1, layers, experts of a token] that computed the tokens of prompt and answer, the last
    one excepted; None unless the request asks for them and the model has experts."""
    kept: Sequence[Sequence[int]] = ()
    """The tokens among which each token was drawn, the likeliest first; empty if no filter applied."""


class TokenMask(Protocol):
    """The constraint on one answer while it is sampled."""

    def allowed(self) -> NDArray[np.uint32]:
        """Return a bit for each token that may come next, the lowest first, in words of 32; tokens beyond may not."""

    def accept(self, token: int) -> None:
        """Note the next token, which is one of the allowed."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodeRequest:
    """Prompts to decode. Every prompt is a row with its own seed; equal prompts share one prefill."""

    prompts: Sequence[Sequence[int]]
    seeds: Sequence[int]
    """Seeds, one for each prompt, below 2**64."""
    max_tokens: int
    temperature: float
    """0 chooses the likeliest token."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: Sequence[int] = ()
    """Tokens that end a row, besides the model's own end tokens."""
    routed_experts: bool = False
    """Whether the answer is to have the numbers of the experts, if the model has any."""
    on_tokens: Callable[[int, Sequence[int], Sequence[float]], None] | None = None
    """Called in the engine's thread with the index of a row, its new tokens and their logprobs, before the result."""
    constraint: Callable[[], TokenMask] | None = None
    """Called for each row; its tokens are sampled from those that the mask allows."""
    ends: Callable[[Sequence[int], int], bool] | None = None
    """Called in the engine's thread with all tokens of a row that has new tokens, and their number; True ends the row,
    e.g. at a stop string. The tokens may go beyond the end of the stop string."""


@dataclass(frozen=True)
class DecodeResult:
    """The rows of a request, in order."""

    version: int
    """The lowest policy version that sampled any of the rows."""
    rows: Sequence[SampledSequence]


class DecodeRow(NamedTuple):
    """One row of a request, as a generator receives it."""

    request: DecodeRequest
    number: int
    """Index of its prompt."""

    @property
    def prompt(self) -> Sequence[int]:
        """Token ids of the prompt."""
        return self.request.prompts[self.number]

    @property
    def seed(self) -> int:
        """The row's seed."""
        return self.request.seeds[self.number]


class DecodedTokens(Protocol):
    """New tokens of the row in a slot."""

    @property
    def slot(self) -> int:
        """The slot."""

    @property
    def tokens(self) -> Sequence[int]:
        """Token ids, at least one."""

    @property
    def logprobs(self) -> Sequence[float]:
        """Log-probabilities of `tokens` under the distribution sampled from."""

    @property
    def kept(self) -> Sequence[Sequence[int]]:
        """The tokens among which each of `tokens` was drawn, the likeliest first; empty if no filter applied."""

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the row ended, which frees its slot; None while it continues."""


class Generator(Protocol):
    """A model, its weights, and slots in which rows are decoded in parallel. Only the engine's thread calls it."""

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens in a prompt and its answer together."""

    @property
    def cache_bytes(self) -> int:
        """Size of all slots in bytes."""

    @property
    def free(self) -> int:
        """Slots without a row."""

    @property
    def behind(self) -> bool:
        """Whether there are newer weights than the loaded weights."""

    def refresh(self) -> int:
        """Load newer weights if there are any; return the policy version now loaded, -1 before the first."""

    def start(self, rows: Sequence[DecodeRow]) -> Sequence[int]:
        """Start rows, at most as many as slots are free; return the slot of each."""

    def decode(self) -> Sequence[DecodedTokens]:
        """Decode some tokens of every row."""

    def routed_experts(self, slot: int, length: int) -> NDArray[Any] | None:
        """Return the experts [length, layers, experts of a token] of the first positions of the row in a slot, which
        may have just ended; None if the model has none."""

    def end(self, slot: int) -> None:
        """Remove the row in a slot before its end."""

    def reset(self) -> None:
        """Remove all rows, after an error."""


def row_seed(*parts: int | str) -> int:
    """Return a 64-bit seed for one row, e.g. from (request seed, sample index), so that rows are independent."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
