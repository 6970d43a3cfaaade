"""OpenAI's completions protocol, as far as we speak it: a request checked, an answer built. Pure.

What would change how tokens are drawn and is not supported is refused, never ignored.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from producers.inference.batching import Answer, Generated
from topics.errors import RollstreamError

DEFAULT_MAX_TOKENS = 16
MAX_STOPS = 4
_OFF: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "stream": (False,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "suffix": ("",),
}
"""Parameters accepted only at the value that turns them off."""
_HARMLESS = {"model", "user", "return_token_ids", "stream_options", "metadata"}
_READ = {"prompt", "n", "best_of", "max_tokens", "temperature", "seed", "stop", "logprobs"}


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    def encode(self, text: str) -> list[int]:
        """Raises a RollstreamError or ValueError where the text cannot be encoded."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; the end token is silent."""


class BadRequest(Exception):
    """A request refused; becomes OpenAI's error object."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(message, kind="invalid_request_error", param=param, code=code)


def error_body(message: str, *, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a server can do."""

    max_prompt_tokens: int
    max_new_tokens: int
    max_rows: int


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """A request that is sound."""

    prompts: Sequence[Sequence[int]]
    n: int
    max_tokens: int
    temperature: float
    seed: int | None
    stop: Sequence[str]
    logprobs: bool

    @property
    def row_prompts(self) -> list[Sequence[int]]:
        """One prompt per choice, in the order of the choices: n of the first prompt, n of the second, ..."""
        return [prompt for prompt in self.prompts for _ in range(self.n)]


def parse_request(body: Mapping[str, Any], tokenizer: Tokenizer, limits: Limits) -> CompletionRequest:
    """Check the body of POST /v1/completions. Raises BadRequest, naming the parameter."""
    for name, value in body.items():
        if name in _OFF:
            if value is not None and value not in _OFF[name]:
                raise BadRequest(
                    f"{name}={value!r} is not supported here; leave it out (off is {_OFF[name][0]!r})", name
                )
        elif name not in _HARMLESS | _READ:
            raise BadRequest(f"unrecognized request argument supplied: {name}", name)
    n = _integer(body, "n", 1, least=1)
    best_of = _integer(body, "best_of", n, least=1)
    if best_of != n:
        raise BadRequest(f"best_of={best_of} is not supported here; leave it out, or equal to n", "best_of")
    logprobs = _integer(body, "logprobs", -1, least=0)
    if logprobs > 1:
        raise BadRequest(f"logprobs={logprobs}: only the sampled token's is known; ask for 1", "logprobs")
    max_tokens = _integer(body, "max_tokens", min(DEFAULT_MAX_TOKENS, limits.max_new_tokens), least=1)
    if max_tokens > limits.max_new_tokens:
        raise BadRequest(
            f"max_tokens={max_tokens}; this server gives at most {limits.max_new_tokens}",
            "max_tokens",
            code="context_length_exceeded",
        )
    prompts = _prompts(body.get("prompt"), tokenizer, limits)
    if len(prompts) * n > limits.max_rows:
        raise BadRequest(f"{len(prompts)} prompts times n={n} is more than {limits.max_rows} sequences", "n")
    return CompletionRequest(
        prompts=prompts,
        n=n,
        max_tokens=max_tokens,
        temperature=_temperature(body.get("temperature")),
        seed=None if body.get("seed") is None else _integer(body, "seed", 0),
        stop=_stop(body.get("stop")),
        logprobs=logprobs >= 0,
    )


def parse_text(body: Mapping[str, Any]) -> str:
    """Check the body of POST /tokenize (vLLM's); its prompt. Raises BadRequest, naming the parameter."""
    text = body.get("prompt")
    if not isinstance(text, str):
        raise BadRequest("prompt must be a string", "prompt")
    return text


def encode(text: str, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a text. Raises BadRequest where the tokenizer refuses it."""
    try:
        return tokenizer.encode(text)
    except (RollstreamError, ValueError) as error:
        raise BadRequest(str(error), "prompt") from error


def completion_body(
    request: CompletionRequest, answer: Answer, tokenizer: Tokenizer, *, identifier: str, created: int, model: str
) -> dict[str, Any]:
    """The answer to a request, with token ids, and the policy version of the whole and of each choice."""
    rows = [_until_stop(row, request.stop, tokenizer) for row in answer.rows]
    choices = []
    for index, (prompt, (row, text)) in enumerate(zip(request.row_prompts, rows, strict=True)):
        choices.append(
            {
                "index": index,
                "text": text,
                "finish_reason": row.finish_reason,
                "logprobs": _logprobs(row, tokenizer) if request.logprobs else None,
                "token_ids": list(row.tokens),
                "prompt_token_ids": list(prompt),
                "lowest_version": answer.version,
                "highest_version": answer.version,
            }
        )
    prompt_tokens = sum(map(len, request.prompts))
    completion_tokens = sum(len(row.tokens) for row, _ in rows)
    return {
        "id": identifier,
        "object": "text_completion",
        "created": created,
        "model": model,
        "choices": choices,
        "policy_version": answer.version,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }


def _integer(body: Mapping[str, Any], name: str, default: int, *, least: int | None = None) -> int:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or (least is not None and value < least):
        raise BadRequest(f"{name}={value!r} must be an integer{'' if least is None else f' of at least {least}'}", name)
    return value


def _temperature(value: Any) -> float:
    if value is None:
        return 1.0
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise BadRequest(f"temperature={value!r} must be a number of at least 0", "temperature")
    return float(value)


def _stop(value: Any) -> tuple[str, ...]:
    stops = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(stops, list | tuple) or not all(isinstance(s, str) and s for s in stops):
        raise BadRequest("stop must be a string or a list of strings, none empty", "stop")
    if len(stops) > MAX_STOPS:
        raise BadRequest(f"stop holds {len(stops)} strings; at most {MAX_STOPS} are supported", "stop")
    return tuple(stops)


def _prompts(value: Any, tokenizer: Tokenizer, limits: Limits) -> list[list[int]]:
    if isinstance(value, str) or (isinstance(value, list) and value and all(_is_id(v) for v in value)):
        value = [value]
    if not isinstance(value, list) or not value:
        raise BadRequest("prompt must be a string, a list of token ids, or a list of either", "prompt")
    prompts = []
    for prompt in value:
        if isinstance(prompt, str):
            ids = encode(prompt, tokenizer)
        elif isinstance(prompt, list) and all(_is_id(v) for v in prompt):
            ids = prompt
        else:
            raise BadRequest("prompt must be a string, a list of token ids, or a list of either", "prompt")
        if ids and not 0 <= min(ids) <= max(ids) < tokenizer.vocab_size:
            raise BadRequest(f"prompt holds a token id outside 0 to {tokenizer.vocab_size - 1}", "prompt")
        if not 0 < len(ids) <= limits.max_prompt_tokens:
            raise BadRequest(
                f"prompt has {len(ids)} tokens; this server takes 1 to {limits.max_prompt_tokens}",
                "prompt",
                code="context_length_exceeded",
            )
        prompts.append(ids)
    return prompts


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _until_stop(row: Generated, stops: Sequence[str], tokenizer: Tokenizer) -> tuple[Generated, str]:
    """The row up to the token that completed a stop string, and its text before that string."""
    text = tokenizer.decode(row.tokens)
    if not any(stop in text for stop in stops):
        return row, text
    for length in range(1, len(row.tokens) + 1):
        text = tokenizer.decode(row.tokens[:length])
        found = [at for stop in stops if (at := text.find(stop)) >= 0]
        if found:
            return Generated(row.tokens[:length], row.logprobs[:length], "stop"), text[: min(found)]
    return row, text


def _logprobs(row: Generated, tokenizer: Tokenizer) -> dict[str, Any]:
    tokens = [tokenizer.decode([token]) for token in row.tokens]
    offsets, at = [], 0
    for token in tokens:
        offsets.append(at)
        at += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [float(logprob) for logprob in row.logprobs],
        "top_logprobs": None,
        "text_offset": offsets,
    }
