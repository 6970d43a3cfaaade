"""Fast JSON for model calls, because the standard library is slow at their lists of tokens and log-probabilities.

The standard library handles only the values that msgspec rejects (NaN, lone surrogates, integers beyond 64 bits).
"""

import json
from typing import Any

import msgspec

_decoder = msgspec.json.Decoder()
_encoder = msgspec.json.Encoder()


def decode(text: bytes | str) -> Any:
    """Return the value of a JSON text. Raises ValueError or RecursionError as `json.loads` does."""
    try:
        return _decoder.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return json.loads(text)


def encode(value: Any) -> bytes:
    """Return the JSON text of a value, in UTF-8. Raises TypeError or ValueError as `json.dumps` does.

    NaN and infinities become null, unless msgspec rejects another part of the value.
    """
    try:
        return _encoder.encode(value)
    except (msgspec.EncodeError, TypeError, ValueError, OverflowError, RecursionError):
        return json.dumps(value, separators=(",", ":")).encode()


def readable(value: Any, separators: tuple[str, str] | None = None) -> str:
    """Return the JSON text of a value, with all characters as they are, except for lone surrogates. Raises TypeError or
    ValueError as `json.dumps` does."""
    return encodable(json.dumps(value, ensure_ascii=False, separators=separators))


def encodable(text: str) -> str:
    """Return a text with its lone surrogates escaped as in JSON, because UTF-8 cannot hold them."""
    return text.encode("utf-8", "backslashreplace").decode()
