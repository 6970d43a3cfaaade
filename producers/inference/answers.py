"""Parses the answers of inference servers into samples: tokens, logprobs and versions as the server gave them. Pure.

Four dialects: OpenAI's chat completions and completions (rollstream, vLLM, SGLang), vLLM's /inference/v1/generate and
SGLang's /generate. Tokens are never guessed from text: an answer without them is refused.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rollstream.producers.inference.errors import ContextTooLong, InferenceRefused
from rollstream.producers.inference.replay_arrays import SamplingMask, experts_of, mask_of
from rollstream.topics.decimal_numbers import decimal_number
from rollstream.topics.records import Float32, Int32, Int64
from rollstream.topics.wire.validation import NO_LOGPROB

Dialect = Literal["chat", "completions", "generate", "sglang"]
_ABORTED = "abort"
"""Reason that vLLM and SGLang give for the end of a sample that they abort."""
_TOKEN_ID = "token_id:"
"""Prefix of tokens that vLLM returns as ids."""
_TOO_LONG_CODES = {"context_length_exceeded", "context_window_exceeded"}
_TOO_LONG_TEXTS = (
    "maximum context length",  # OpenAI, vLLM, and SGLang for prompt and answer together
    "longer than the maximum model length",  # vLLM, for a prompt of tokens
    "longer than the model's context length",  # SGLang, for a prompt
    "exceeds the model's context length",
)
_QUOTED = 500


@dataclass(frozen=True, kw_only=True)
class VersionSpan:
    """A run of sampled tokens, from `start` up to `stop`, and the label of the weights that sampled them."""

    label: str
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One choice of an answer; `tokens` and `logprobs` have shape [N]."""

    text: str
    """Text sampled; empty where the dialect gives tokens only."""
    finish_reason: str
    """Why it ended: stop, length, tool_calls, abort, or another value that the server uses."""
    prompt_tokens: Int32
    """Token ids of the prompt."""
    tokens: Int32
    """Token ids sampled, including the end token."""
    logprobs: Float32
    """Log-probabilities of `tokens`, all finite."""
    spans: tuple[VersionSpan, ...] = ()
    """Versions of `tokens`, from the first token to the last without a gap; empty where the server names none."""
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    """OpenAI's tool calls of the message, as the server parsed them."""
    replica_id: str = ""
    """Name of the server; empty if its answer has none."""
    experts: NDArray[Any] | None = None
    """Experts of the tokens of prompt and answer, see replay_arrays.experts_of; None where the server names none."""
    mask: SamplingMask | None = None
    """Tokens among which each token was drawn; None where the server names none."""

    @property
    def truncated(self) -> bool:
        """Whether a token limit cut the sample off."""
        return self.finish_reason == "length"

    @property
    def aborted(self) -> bool:
        """Whether the server aborted the sample, e.g. to swap weights; a new request may succeed."""
        return self.finish_reason == _ABORTED


def has_aborted_choice(answer: Mapping[str, Any]) -> bool:
    """Whether the server aborted a sample of an answer of OpenAI's routes, which then has only the tokens so far."""
    choices = answer.get("choices")
    return isinstance(choices, list) and any(
        isinstance(choice, dict) and choice.get("finish_reason") == _ABORTED for choice in choices
    )


def refusal_of(status: int, text: str, *, source: str) -> InferenceRefused:
    """Return the error for a status other than 200: ContextTooLong if the request was too long, else InferenceRefused.

    Recognises OpenAI's code and the texts of vLLM and SGLang.
    """
    error = _error_object(text)
    quoted = " ".join(str(error.get("message") or text).split())[:_QUOTED]
    message = f"{source} refused the request: {status} {quoted}"
    named = str(error.get("code")) in _TOO_LONG_CODES or any(each in text.lower() for each in _TOO_LONG_TEXTS)
    if status in (400, 413, 422) and named:
        return ContextTooLong(message, status)
    return InferenceRefused(message, status)


def samples_of(body: Any, dialect: Dialect, *, source: str, prompt_tokens: Sequence[int] | None = None) -> list[Sample]:
    """Return the samples in an answer, in the order of their index.

    `source` names the server in errors; `prompt_tokens` are the request's, for answers that do not repeat them.
    Raises InferenceRefused if tokens, the prompt's tokens or logprobs are missing or disagree, or if the versions do
    not cover the tokens.
    """
    try:
        if dialect == "sglang":
            outputs = body if isinstance(body, list) else [body]
            return [_sglang_sample(output, source, prompt_tokens) for output in outputs]
        choices = sorted(body["choices"], key=lambda choice: choice["index"])
        return [_openai_sample(choice, body, len(choices), source, prompt_tokens) for choice in choices]
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InferenceRefused(f"{source} answered in a shape that is not valid for {dialect}: {error!r}") from error


def token_versions(spans: Sequence[VersionSpan], length: int, version_of: Callable[[str], int]) -> Int64:
    """Return the policy version of each sampled token, int64 [length]; -1 where no span covers it.

    `version_of` returns the version that a label names, -1 if it names none.
    """
    versions = np.full(length, -1, np.int64)
    for span in spans:
        versions[span.start : span.stop] = version_of(span.label)
    return versions


def _openai_sample(
    choice: Mapping[str, Any],
    body: Mapping[str, Any],
    choices: int,
    source: str,
    asked_tokens: Sequence[int] | None,
) -> Sample:
    message = choice.get("message") or {}
    text = message.get("content") if message else choice.get("text")
    logprobs, named_tokens = _logprobs(choice.get("logprobs") or {})
    # SGLang's chat names the field response_token_ids.
    tokens = _first(choice.get("token_ids"), choice.get("response_token_ids"), named_tokens)
    return _sample(
        source,
        text=text,
        finish_reason=choice["finish_reason"],
        prompt_tokens=_first(choice.get("prompt_token_ids"), body.get("prompt_token_ids"), asked_tokens),
        tokens=tokens,
        logprobs=logprobs,
        versions=_openai_versions(choice, body, choices),
        tool_calls=message.get("tool_calls") or (),
        replica_id=body.get("replica_id"),
        experts=(
            _first(
                choice.get("routed_experts"), (choice.get("sglext") or body.get("sglext") or {}).get("routed_experts")
            ),
            body.get("prompt_routed_experts"),
        ),
        mask=choice.get("sampling_mask"),
    )


def _sglang_sample(output: Mapping[str, Any], source: str, asked_tokens: Sequence[int] | None) -> Sample:
    meta = output["meta_info"]
    entries = meta.get("output_token_logprobs")
    finish_reason = meta["finish_reason"]
    return _sample(
        source,
        text=output.get("text"),
        finish_reason=finish_reason["type"] if isinstance(finish_reason, Mapping) else finish_reason,
        prompt_tokens=_first(output.get("prompt_token_ids"), meta.get("prompt_token_ids"), asked_tokens),
        tokens=_first(output.get("output_ids"), entries and [entry[1] for entry in entries]),
        # Those of the distribution over the kept tokens, if filters applied.
        logprobs=_first(
            meta.get("output_token_sampling_logprobs"), None if entries is None else [entry[0] for entry in entries]
        ),
        versions=_first(meta.get("weight_versions"), meta.get("weight_version")),
        tool_calls=(),
        replica_id=meta.get("replica_id"),
        experts=(meta.get("routed_experts"), None),
        mask=meta.get("output_token_sampling_mask"),
    )


def _sample(
    source: str,
    *,
    text: Any,
    finish_reason: Any,
    prompt_tokens: Sequence[int] | None,
    tokens: Sequence[int] | None,
    logprobs: Sequence[float | None] | None,
    versions: Any,
    tool_calls: Sequence[Mapping[str, Any]],
    replica_id: Any,
    experts: tuple[Any, Any],
    mask: Any,
) -> Sample:
    if tokens is None or prompt_tokens is None:
        raise InferenceRefused(
            f"{source} answered without token_ids or prompt_token_ids; tokens are never guessed from text: use a "
            "server that returns them (rollstream role infer, or a vLLM or SGLang that knows return_token_ids)"
        )
    if logprobs is None or len(logprobs) != len(tokens) or any(value is None for value in logprobs):
        raise InferenceRefused(
            f"{source} answered {len(tokens)} tokens, but not a logprob for each; does it allow logprobs?"
        )
    if not isinstance(finish_reason, str):
        raise ValueError("finish_reason is missing")
    values = np.asarray(logprobs, np.float32)
    if not all(value > NO_LOGPROB and math.isfinite(value) for value in values.tolist()):
        raise InferenceRefused(f"{source} answered with a logprob that is not finite")
    token_ids = _token_ids(tokens)
    return Sample(
        text="" if text is None else str(text),
        finish_reason=finish_reason,
        prompt_tokens=_token_ids(prompt_tokens),
        tokens=token_ids,
        logprobs=values,
        spans=_spans(versions, len(tokens), source),
        tool_calls=tuple(dict(call) for call in tool_calls),
        replica_id="" if replica_id is None else str(replica_id),
        experts=experts_of(experts[0], len(prompt_tokens), len(tokens), prompt_value=experts[1]),
        mask=mask_of(mask, token_ids),
    )


def _logprobs(logprobs: Mapping[str, Any]) -> tuple[Sequence[float | None] | None, list[int] | None]:
    """Return the logprobs of completions or of chat, and the token ids if every token is named by its id."""
    if "token_logprobs" in logprobs:
        values, names = logprobs["token_logprobs"], logprobs.get("tokens") or ()
    elif "content" in logprobs:
        content = logprobs["content"] or ()
        values = [entry["logprob"] for entry in content]
        names = [entry.get("token_id", entry.get("token")) for entry in content]
    else:
        return None, None
    tokens = [_named_token(name) for name in names]
    return values, [t for t in tokens if t is not None] if tokens and None not in tokens else None


def _named_token(name: Any) -> int | None:
    if isinstance(name, int) and not isinstance(name, bool):
        return name
    return decimal_number(name[len(_TOKEN_ID) :]) if isinstance(name, str) and name.startswith(_TOKEN_ID) else None


def _openai_versions(choice: Mapping[str, Any], body: Mapping[str, Any], choices: int) -> Any:
    """Return a choice's spans, else its label; spans in the body's metadata count only if there is one choice."""
    metadata = body.get("metadata") or {}
    return _first(
        choice.get("weight_versions"),
        metadata.get("weight_versions") if choices == 1 else None,
        choice.get("weight_version"),
        metadata.get("weight_version"),
        body.get("policy_version"),
    )


def _spans(versions: Any, length: int, source: str) -> tuple[VersionSpan, ...]:
    """Return spans over [0, length) from a list of spans or from one label, without empty spans."""
    if versions is None or versions == -1 or not length:
        return ()
    if isinstance(versions, str | int):
        return (VersionSpan(label=str(versions), start=0, stop=length),)
    spans = [
        # The last spans may still cover tokens that the server removed, such as the tokens of a stop string.
        VersionSpan(label=str(v["version"]), start=int(v["start"]), stop=min(int(v["end"]), length))
        for v in versions
    ]
    spans = [span for span in spans if span.start < span.stop]
    edges = [0, *(span.stop for span in spans)]
    if [span.start for span in spans] != edges[:-1] or edges[-1] != length:
        raise InferenceRefused(f"{source} answered weight_versions that do not cover its {length} tokens in order")
    return tuple(spans)


def _token_ids(values: Sequence[int]) -> Int32:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError("token ids must be a list of integers")
    if array.size and (array.min() < 0 or array.max() > np.iinfo(np.int32).max):
        raise ValueError("a token id is outside the range of int32")
    return array.astype(np.int32)


def _error_object(text: str) -> dict[str, Any]:
    """Return the error object of an answer, nested as OpenAI does or flat as SGLang does; empty if there is none."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    error = body.get("error", body) if isinstance(body, dict) else None
    return error if isinstance(error, dict) else {}


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
