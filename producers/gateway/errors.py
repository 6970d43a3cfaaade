"""Errors of the gateway."""

from rollstream.producers.inference.errors import InferenceRefused
from rollstream.topics.errors import RollstreamError


class SessionClosed(RollstreamError):
    """A call or a reward comes too late: the session has ended, is closed, or has made its maximum of calls."""


class NoSuchSession(RollstreamError):
    """The session is not on the log of this run."""


class NoCapacity(RollstreamError):
    """No session can start now: the learner is too far behind, too many sessions are open, or the run is drained."""


class NoVersion(RollstreamError):
    """No server has named a policy version yet."""


class UpstreamRefused(RollstreamError):
    """A server refused a request, which it would refuse again; `cause` is the reason."""

    def __init__(self, status: int, text: str, cause: InferenceRefused) -> None:
        super().__init__(str(cause))
        self.status = status
        self.text = text
        """Body of the server's answer."""
        self.cause = cause
