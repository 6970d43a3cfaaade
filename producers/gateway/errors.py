"""Errors of the gateway."""

from rollstream.producers.inference.errors import InferenceRefused
from rollstream.topics.errors import RollstreamError


class SessionClosed(RollstreamError):
    """The session accepts no more calls because it has ended, failed or been abandoned."""


class NoSuchSession(RollstreamError):
    """The session is not on the log of this run."""


class NoCapacity(RollstreamError):
    """No session can start now: the learner is too far behind, or too many sessions are open."""


class NoVersion(RollstreamError):
    """No server has named a policy version yet."""


class UpstreamRefused(RollstreamError):
    """A server refused a request because of the request itself; `cause` is the reason."""

    def __init__(self, status: int, text: str, cause: InferenceRefused) -> None:
        super().__init__(str(cause))
        self.status = status
        self.text = text
        """Body of the server's answer."""
        self.cause = cause
