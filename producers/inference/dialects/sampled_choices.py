"""One answer of the engine as the dialects show it, whole or while it grows: cut at its stop, with text and versions.

A growing text is decoded from a token before its new tokens on, and the text of earlier tokens is kept, since further
tokens are assumed only to add to a text, except to an incomplete character at its end. The whole text is decoded if
they change more. A tokenizer with byte tokens also shows complete characters next to an incomplete one as U+FFFD. A
stop with U+FFFD may be found late.
"""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollstream.producers.inference.decoding import DecodeResult, PolicySpan, SampledSequence
from rollstream.producers.inference.dialects.fields import BadRequest
from rollstream.producers.inference.dialects.sampling_parameters import SamplingParameters, SamplingRequest
from rollstream.producers.inference.token_codec import TokenCodec
from rollstream.topics.errors import RollstreamError

UNKNOWN_CHARACTER = "\ufffd"
"""Text of a character whose tokens are incomplete."""
_CHARACTER_BYTES = 4
"""Bytes of the longest character in UTF-8; a token has at least one byte."""


def contains_stop(text: str, stops: Sequence[str]) -> bool:
    """Whether a stop is in a text."""
    return any(stop in text for stop in stops)


def stopped_length(tokens: Sequence[int], stops: Sequence[str], tokenizer: TokenCodec) -> int:
    """Return the number of tokens up to the one that completes the first stop. The text of `tokens` contains a stop.

    The search begins at the end, because the engine ends a row soon after its stop.
    """
    # At length `none` the text contains no stop, and at length `some` it does.
    none, some, step = 0, len(tokens), 1
    while some - none > 1:
        middle = max((none + some) // 2, some - step)
        if length := _settled_length(tokens, none, middle, stops, tokenizer):
            some, step = length, 2 * step
        else:
            none = middle
    return some


def _settled_length(tokens: Sequence[int], none: int, length: int, stops: Sequence[str], tokenizer: TokenCodec) -> int:
    """Return the largest length up to `length` at which the text contains a stop; 0 if no earlier text does.

    An incomplete character at the end of a text may hide a stop before it, so the text without that character decides.
    """
    for count in range(length, max(none, length - _CHARACTER_BYTES), -1):
        text = tokenizer.decode(tokens[:count])
        if contains_stop(text, stops):
            return count
        if not text.endswith(UNKNOWN_CHARACTER):
            break
    return 0


def has_new_stop(tokens: Sequence[int], new: int, stops: Sequence[str], tokenizer: TokenCodec) -> bool:
    """Whether the text of `tokens` contains a stop, if it contained none before the last `new` tokens.

    Decodes only as many tokens as a stop among the new ones may have, unless an incomplete character may have hidden a
    stop. If some of them have no text, a stop may be missed; the answer is cut at it once it is complete.
    """
    before = len(tokens) - new
    start = max(0, before - _CHARACTER_BYTES * (max(map(len, stops)) + 1))  # it may begin within a character
    hidden = tokenizer.decode(tokens[start:before]).endswith(UNKNOWN_CHARACTER)
    # A token may have another text at the beginning than elsewhere, so the whole text decides.
    return (hidden or contains_stop(tokenizer.decode(tokens[start:]), stops)) and contains_stop(
        tokenizer.decode(tokens), stops
    )


@dataclass(frozen=True, kw_only=True)
class SampledChoice:
    """One answer to a prompt, complete or still growing."""

    index: int
    prompt: Sequence[int]
    tokens: Sequence[int]
    """Token ids as sampled, up to the one that ended the answer."""
    logprobs: Sequence[float]
    text: str
    """Text before the stop string or token."""
    finish_reason: str | None
    """stop or length; None while it is not complete."""
    stop_reason: int | str | None
    """The stop string or token of the request that ended it; None for an end token of the model."""
    versions: tuple[PolicySpan, ...]
    routed_experts: NDArray[Any] | None = None
    """Experts of prompt and tokens, the last token excepted; see SampledSequence."""
    kept: Sequence[Sequence[int]] = ()
    """Tokens among which each token was drawn, if the request asks for them and has a filter."""

    @property
    def replay_fields(self) -> dict[str, Any]:
        """What a learner replays, as vLLM answers it: experts as an .npy file in base64, and the tokens that filters
        kept; nothing if it is unknown."""
        answer: dict[str, Any] = {}
        if self.routed_experts is not None:
            file = io.BytesIO()
            np.save(file, self.routed_experts, allow_pickle=False)
            answer["routed_experts"] = base64.b64encode(file.getvalue()).decode()
        if self.kept:
            answer["sampling_mask"] = list(map(list, self.kept))
        return answer

    @property
    def lowest_version(self) -> int:
        """Lowest policy version that sampled a token."""
        return min((run.version for run in self.versions), default=-1)

    @property
    def highest_version(self) -> int:
        """Highest policy version that sampled a token."""
        return max((run.version for run in self.versions), default=-1)

    @property
    def version_fields(self) -> dict[str, Any]:
        """Versions for an answer: numbers, and the labelled spans of vLLM and SGLang."""
        return {
            "lowest_version": self.lowest_version,
            "highest_version": self.highest_version,
            "weight_versions": [
                {"version": str(run.version), "start": run.start, "end": run.stop} for run in self.versions
            ],
        }


def choices_of(request: SamplingRequest, result: DecodeResult, tokenizer: TokenCodec) -> list[SampledChoice]:
    """Return the answers to a request, in the order of the choices."""
    return [
        sampled_choice(index, prompt, row, request.parameters, tokenizer)
        for index, (prompt, row) in enumerate(zip(request.row_prompts, result.rows, strict=True))
    ]


def sampled_choice(
    index: int,
    prompt: Sequence[int],
    row: SampledSequence,
    parameters: SamplingParameters,
    tokenizer: TokenCodec,
    *,
    complete: bool = True,
) -> SampledChoice:
    """Cut a row at the first stop string or stop token of the request.

    A row that is not complete has no finish reason, even if it is cut.
    """
    count, text, reason = _first_stop(row.tokens, parameters, tokenizer)
    finish_reason = row.finish_reason if reason is None else "stop"
    return SampledChoice(
        index=index,
        prompt=prompt,
        tokens=row.tokens[:count],
        logprobs=row.logprobs[:count],
        text=text,
        finish_reason=finish_reason if complete else None,
        stop_reason=reason,
        versions=tuple(
            PolicySpan(span.version, span.start, min(span.stop, count)) for span in row.spans if span.start < count
        ),
        routed_experts=None if row.routed_experts is None else row.routed_experts[: len(prompt) + count - 1],
        kept=row.kept[:count] if parameters.sampling_mask else (),
    )


def held_back(text: str, markers: Sequence[str]) -> str:
    """Return the part of an incomplete text that later tokens cannot change.

    The end of the text is held back if it may be the beginning of one of `markers` or of an incomplete character.
    """
    text = text.rstrip(UNKNOWN_CHARACTER)
    longest = max(
        (
            length
            for marker in markers
            for length in range(1, min(len(marker), len(text) + 1))
            if text.endswith(marker[:length])
        ),
        default=0,
    )
    return text[: len(text) - longest]


def encode(text: str, tokenizer: TokenCodec) -> list[int]:
    """Return the token ids of a text. Raises BadRequest if the tokenizer refuses it."""
    try:
        return tokenizer.encode(text)
    except (RollstreamError, ValueError) as error:
        raise BadRequest(str(error), "prompt") from error


def _first_stop(
    tokens: Sequence[int], parameters: SamplingParameters, tokenizer: TokenCodec
) -> tuple[int, str, int | str | None]:
    """Return the number of tokens up to the first stop, the text before it, and the stop itself if there is one."""
    position = next((i for i, token in enumerate(tokens) if token in parameters.stop_token_ids), None)
    count, reason = (len(tokens), None) if position is None else (position + 1, tokens[position])
    text = tokenizer.decode(tokens[: count - (reason is not None)])
    if contains_stop(text, parameters.stop):
        length = stopped_length(tokens[: count - (reason is not None)], parameters.stop, tokenizer)
        prefix = tokenizer.decode(tokens[:length])
        start, stop = min((start, stop) for stop in parameters.stop if (start := prefix.find(stop)) >= 0)
        return length, prefix[:start], stop
    return count, text, reason


class GrowingText:
    """The text of tokens, to which further tokens are added."""

    def __init__(self, tokenizer: TokenCodec) -> None:
        self._tokenizer = tokenizer
        self._text = ""
        """Text of the first `_settled` tokens, whose last character is complete."""
        self._settled = 0
        self._start = 0
        """Token from which on tokens are decoded. The text of those from here to `_settled` is not empty, since a token
        may have another text at the beginning than elsewhere."""

    def text_of(self, tokens: Sequence[int]) -> str:
        """Return the text of all tokens, which begin with those of earlier calls."""
        known = self._tokenizer.decode(tokens[self._start : self._settled])
        window = self._tokenizer.decode(tokens[self._start :])
        text = self._text + window[len(known) :] if window.startswith(known) else self._tokenizer.decode(tokens)
        if not text.endswith(UNKNOWN_CHARACTER):
            if len(text) > len(self._text):
                self._start = self._settled
            self._text, self._settled = text, len(tokens)
        return text


class GrowingChoice:
    """The answer to one prompt."""

    def __init__(
        self, index: int, prompt: Sequence[int], parameters: SamplingParameters, tokenizer: TokenCodec
    ) -> None:
        self._index, self._prompt = index, prompt
        self._parameters, self._tokenizer = parameters, tokenizer
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._text = GrowingText(tokenizer)
        self._stopped = False

    def add(self, tokens: Sequence[int], logprobs: Sequence[float]) -> SampledChoice | None:
        """Return the choice with these further tokens, without its versions and finish reason; None if it was already
        cut at a stop. The choice is valid until the next call."""
        self._tokens.extend(tokens)
        self._logprobs.extend(logprobs)
        if self._stopped:
            return None
        text = self._text.text_of(self._tokens)
        if contains_stop(text, self._parameters.stop) or not self._parameters.stop_token_ids.isdisjoint(tokens):
            row = SampledSequence(self._tokens, self._logprobs, finish_reason="length")
            choice = sampled_choice(self._index, self._prompt, row, self._parameters, self._tokenizer, complete=False)
            self._stopped = choice.stop_reason is not None
            return choice
        return SampledChoice(
            index=self._index,
            prompt=self._prompt,
            tokens=self._tokens,
            logprobs=self._logprobs,
            text=text,
            finish_reason=None,
            stop_reason=None,
            versions=(),
        )
