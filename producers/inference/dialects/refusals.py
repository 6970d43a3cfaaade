"""Refusals of a request, as OpenAI's error object."""

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
