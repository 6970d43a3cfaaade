"""The answers after which a request is sent again, and the wait until it may be.

A request waits for its turn: until a server may be asked and, if it was sent before, until all retries together leave
room for it. A request whose turn does not come fails only at its deadline, so that a caller that goes on to its next
request sends no more requests than before.
"""

import asyncio
import email.utils
import math
import time

from rollstream.producers.inference.errors import InferenceRefused
from rollstream.producers.inference.replicas import Replica, ReplicaSet, RetryBudget
from rollstream.topics.decimal_numbers import decimal_number

_LOOK_AGAIN_S = 1.0
RETRIED_STATUS = {429, 502, 503, 504}
"""HTTP statuses of temporary refusals."""
_NOT_FAULTS = {501, 505}
MOST_FAULTS = 3
"""Faults after which a request is given up: a server that fails at this request alone would fail again."""


def is_fault(status: int) -> bool:
    """Whether a status says that the server failed, so that another server may answer the request."""
    return status >= 500 and status not in RETRIED_STATUS and status not in _NOT_FAULTS


class Busy(Exception):
    """A temporary refusal."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """Seconds that the server asks to be left alone; None if it does not say."""


class ServerFault(Busy):
    """A failure of a server; `refusal` is the error if other servers fail as well."""

    def __init__(self, refusal: InferenceRefused) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


class NoTurn(Exception):
    """No server may be asked before the deadline. The message says why; it is empty if earlier failures say it."""


class ServerTurns:
    """The turns of a client's requests at its servers."""

    def __init__(self, replicas: ReplicaSet) -> None:
        self._replicas = replicas
        self._budget = RetryBudget()

    async def next(self, session: str, deadline: float, *, again: bool) -> Replica:
        """Return the server to ask, once it may be asked. `again` is whether the request was sent before, and
        `deadline` is on the monotonic clock.

        Raises NoTurn at the deadline.
        """
        now = time.monotonic()
        turn_at, reason = now, ""
        # A request that has to give up leaves the budget to others.
        if again and self._replicas.choose(session, now).ready_at < deadline:
            turn_at += self._budget.reserve(now, deadline)
        while now < deadline:
            replica = self._replicas.choose(session, now)
            ready_at = max(turn_at, replica.ready_at)
            if ready_at <= now:
                return replica
            if turn_at == math.inf:
                reason = "so many requests failed that its turn to try again does not come"
            elif not again:
                reason = f"{replica.url} may not be asked for {ready_at - now:.3g} s"
            # Another request may have been answered in the meantime, or the servers may have changed.
            await asyncio.sleep(min(min(ready_at, deadline) - now, _LOOK_AGAIN_S))
            now = time.monotonic()
        raise NoTurn(reason)


def retry_after_s(value: str | None) -> float | None:
    """Return the seconds in a Retry-After header, which holds seconds or a date; None if it holds neither."""
    if value is None:
        return None
    if (seconds := decimal_number(value.strip())) is not None:
        return float(seconds)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
