"""Errors of calls to inference servers, separate from the client so that parsers and gateways raise the same errors."""

from rollstream.topics.errors import RollstreamError


class InferenceUnavailable(RollstreamError):
    """No server answered within the deadline."""


class InferenceRefused(RollstreamError):
    """A server refused the request, or its answer lacks data that a rollout needs; a retry would not help."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status of the refusal; 0 for an answer that cannot be used."""


class ContextTooLong(InferenceRefused):
    """Prompt and answer together exceed the model's context; the episode ends truncated, and the worker continues."""
