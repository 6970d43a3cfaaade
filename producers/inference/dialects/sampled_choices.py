"""One answer of the engine as the dialects show it: cut at its stop, with its text and the versions of its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollstream.producers.inference.decoding import DecodeResult, PolicySpan, SampledSequence
from rollstream.producers.inference.dialects.refusals import BadRequest
from rollstream.producers.inference.dialects.sampling_parameters import SamplingParameters, SamplingRequest
from rollstream.producers.inference.dialects.stop_strings import UNKNOWN_CHARACTER, contains_stop, stopped_length
from rollstream.producers.inference.token_codec import TokenCodec
from rollstream.topics.errors import RollstreamError


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
