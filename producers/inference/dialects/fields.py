"""Typed reading of the fields of a JSON body, and refusals of a request, as OpenAI's error object."""

import math
from collections.abc import Mapping
from typing import Any

CONTEXT_TOO_LONG = "context_length_exceeded"
"""OpenAI's code for a prompt that does not fit into the context, alone or with its answer."""


class BadRequest(Exception):
    """A refused request; its `body` is OpenAI's error object."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(message, kind="invalid_request_error", param=param, code=code)


def error_body(message: str, *, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def integer(body: Mapping[str, Any], name: str, default: int, *, least: int | None = None) -> int:
    """Return an integer field, `default` where it is absent or null."""
    value = body.get(name)
    if value is None:
        return default
    if not is_integer(value) or (least is not None and value < least):
        raise BadRequest(
            f"{name}={shown(value)} must be an integer{'' if least is None else f' of at least {least}'}", name
        )
    return int(value)


def number(body: Mapping[str, Any], name: str, default: float, *, least: float, most: float = math.inf) -> float:
    """Return a finite number, `default` where it is absent or null."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= min(most, 1e30):
        limits = f"of at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
        raise BadRequest(f"{name}={shown(value)} must be a number {limits}", name)
    return float(value)


def flag(body: Mapping[str, Any], name: str) -> bool:
    """Return a boolean, false where it is absent or null."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"{name}={shown(value)} must be true or false", name)
    return bool(value)


def strings(body: Mapping[str, Any], name: str, *, most: int) -> tuple[str, ...]:
    """Return a list of at most `most` strings, none of them empty; a single string counts as a list of one."""
    value = body.get(name)
    texts = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
        raise BadRequest(f"{name} must be a string or a list of strings, none empty", name)
    if len(texts) > most:
        raise BadRequest(f"{name} holds {len(texts)} strings; at most {most} are supported", name)
    return tuple(texts)


def mapping(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object, an empty one where it is absent or null."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRequest(f"{name}={shown(value)} must be an object", name)
    return value


def token_ids(value: Any, name: str, vocab_size: int) -> list[int]:
    """Return a list of token ids, empty where `value` is null."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(map(is_integer, value)):
        raise BadRequest(f"{name} must be a list of token ids", name)
    if value and not 0 <= min(value) <= max(value) < vocab_size:
        raise BadRequest(f"{name} holds a token id outside 0 to {vocab_size - 1}", name)
    return value


def is_integer(value: Any) -> bool:
    """Whether a JSON value is an integer; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def shown(value: Any) -> str:
    """Return a value for a message, cut to a readable length."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
