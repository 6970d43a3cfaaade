"""Answers of the API: JSON without NaN, errors with their remedy, and headers that restrict a browser to this page."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

CONTENT_SECURITY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}
NO_STORE = "no-store"


class UnusableParameter(Exception):
    """A request whose parameters cannot be used."""

    def __init__(self, error: str, remedy: str) -> None:
        super().__init__(error)
        self.error, self.remedy = error, remedy


def json_text(value: Any) -> str:
    """Return the JSON of a value; numbers that JSON cannot express become null."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(finite(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def finite(value: Any) -> Any:
    """Return the value with None for each number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [finite(item) for item in value]
    return value


def answer(value: Any, status: int = 200) -> web.Response:
    """Return a value as JSON."""
    # Half of a surrogate pair cannot be encoded in UTF-8, and texts of agents may contain one.
    body = json_text(value).encode("utf-8", errors="replace")
    headers = {"Cache-Control": NO_STORE}
    return web.Response(body=body, status=status, content_type="application/json", charset="utf-8", headers=headers)


def refusal(status: int, error: str, remedy: str = "") -> web.Response:
    """Return an error, with a remedy if one is known."""
    return answer({"error": error, "remedy": remedy} if remedy else {"error": error}, status)
