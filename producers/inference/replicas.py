"""Chooses a server for each request, by the known state of all servers of one model. Pure; times are passed in.

A session stays with its server while that server is healthy and up to date (rendezvous hashing), so that prefixes stay
cached. A failed server is avoided for a time that grows with each failure. A server whose version lags is avoided until
it has caught up.
"""

import hashlib
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rollstream.producers.inference.requests import EngineName

_FIRST_REST_S = 0.05
_LONGEST_REST_S = 2.0
_LONGEST_ASKED_S = 60.0
"""Longest rest that a server can ask for. Proxies name longer ones for outages that may end sooner."""
_LOOK_AGAIN_S = 1.0


@dataclass
class Replica:
    """One server, and its state as known from its answers."""

    url: str
    """Base URL, which ends in /v1."""
    engine: EngineName | None = None
    """Kind of server, once known."""
    named: bool = False
    """Whether its list of models names its kind."""
    version: int = -1
    """Newest policy version in its answers; -1 if they name none."""
    tells_version: bool = False
    """Whether an answer to a probe has named a version."""
    lost_version: bool = False
    """Whether the last answer to a probe names none although an earlier one did, as after a restart."""
    failures: int = 0
    """Failures since the last answer."""
    ready_at: float = 0.0
    """Time until which the server is avoided after a failure."""
    asked_until: float = 0.0
    """Time until which the server has asked to be left alone."""
    looked_at: float = 0.0
    """Time of the last probe of the server."""


class ReplicaSet:
    """The servers that a client may use."""

    def __init__(self, urls: Iterable[str], *, max_version_skew: int, random_seed: int | None = None) -> None:
        """Avoid servers more than `max_version_skew` versions behind the newest; a negative value means no limit."""
        self.replicas = [Replica(url.rstrip("/")) for url in dict.fromkeys(urls)]
        self._max_version_skew = max_version_skew
        self._random = random.Random(random_seed)

    def use(self, urls: Iterable[str]) -> None:
        """Use these servers from now on; servers that were already in use keep their state."""
        known = {replica.url: replica for replica in self.replicas}
        wanted = [url.rstrip("/") for url in dict.fromkeys(urls)]
        self.replicas = [known.get(url) or Replica(url) for url in wanted]

    @property
    def newest_version(self) -> int:
        """Newest policy version in any answer."""
        return max(replica.version for replica in self.replicas)

    def choose(self, session: str, now: float) -> Replica:
        """Return the server to use for a session; if all have failed lately, the server whose pause ends first."""
        ranked = sorted(self.replicas, key=lambda replica: _weight(session, replica.url), reverse=True)
        return min(ranked, key=lambda r: (max(r.ready_at, now), r.failures > 0, self.lags(r)))

    def lags(self, replica: Replica) -> bool:
        """Whether a server is too far behind the newest version, or has lost its version; false for a server that never
        named one."""
        behind = self.newest_version - replica.version
        return replica.lost_version or (replica.version >= 0 and 0 <= self._max_version_skew < behind)

    def to_look_at(self, now: float) -> Sequence[Replica]:
        """Return the servers due for a probe, because they lag or because their pause after a failure is over."""
        due = [
            replica
            for replica in self.replicas
            if len(self.replicas) > 1
            and (self.lags(replica) or (replica.failures and replica.ready_at <= now))
            and now - replica.looked_at >= _LOOK_AGAIN_S
        ]
        for replica in due:
            replica.looked_at = now
        return due

    def answered(self, replica: Replica, version: int, now: float) -> None:
        """Note an answer and the newest version in it, -1 for none. A pause that the server asked for stays: a full
        server goes on answering the requests that it admitted before."""
        if replica.asked_until <= now:
            replica.failures, replica.ready_at = 0, 0.0
        replica.version = max(replica.version, version)
        if version >= 0:
            replica.lost_version = False

    def looked(self, replica: Replica, version: int, now: float) -> None:
        """Note the answer to a probe and the version in it, -1 for none. A pause that is not over stays: a server may
        answer probes while it refuses requests."""
        if replica.ready_at <= now:
            replica.failures = 0
        replica.lost_version = version < 0 and replica.tells_version
        if version >= 0:
            # A server that was restarted may have an earlier version than before.
            replica.version, replica.tells_version = version, True

    def failed(self, replica: Replica, now: float, retry_after_s: float | None = None) -> None:
        """Note a failure: avoid the server for as long as it asks, at most a minute, else for a random time that grows
        with each failure.

        Requests that fail together count as one failure.
        """
        if retry_after_s is None and now < replica.ready_at:
            return
        replica.failures += 1
        bound_s = min(_LONGEST_REST_S, _FIRST_REST_S * 2.0 ** min(replica.failures, 16))
        asked_s = None if retry_after_s is None else min(retry_after_s, _LONGEST_ASKED_S)
        rest_s = self._random.uniform(bound_s / 2, bound_s) if asked_s is None else asked_s
        if asked_s is not None:
            replica.asked_until = max(replica.asked_until, now + asked_s)
        replica.ready_at = max(replica.ready_at, now + rest_s)


class RetryBudget:
    """Limits the retries of all requests of a client together: to a burst, then to a rate.

    However many requests fail at once, struggling servers receive retries no faster than this rate.
    """

    def __init__(self, *, burst: int = 64, per_s: float = 10.0) -> None:
        self._burst = burst
        self._per_s = per_s
        self._left = float(burst)
        self._at = 0.0

    def reserve(self, now: float, deadline: float = math.inf) -> float:
        """Reserve one retry; return the seconds until it may be made.

        Returns infinity, and reserves nothing, if it may not be made before `deadline`: a request that gives up leaves
        the rate to the others.
        """
        self._left = min(self._burst, self._left + max(0.0, now - self._at) * self._per_s)
        self._at = max(self._at, now)
        wait_s = max(0.0, (1.0 - self._left) / self._per_s)
        if self._at + wait_s >= deadline:
            return math.inf
        self._left -= 1.0
        return wait_s


def _weight(session: str, url: str) -> bytes:
    return hashlib.blake2b(f"{session}\0{url}".encode(), digest_size=8).digest()
