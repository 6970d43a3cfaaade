"""Chooses a server for each request, from what is known of all servers of one model. Pure; times are passed in.

A session stays with its server while that is healthy and not behind (rendezvous hashing), so that prefixes stay cached.
A failed server rests, longer after each failure; a server whose version lags is passed over until it has caught up.
"""

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rollstream.producers.inference.requests import EngineName

_FIRST_REST_S = 0.05
_LONGEST_REST_S = 2.0
_LOOK_AGAIN_S = 1.0


@dataclass
class Replica:
    """One server and what its answers tell of it."""

    url: str
    """Base URL, ends in /v1."""
    engine: EngineName | None = None
    """Kind of server, once known."""
    version: int = -1
    """Newest policy version in its answers; -1 if they name none."""
    failures: int = 0
    """Failures since the last answer."""
    ready_at: float = 0.0
    """Time until which it rests."""
    looked_at: float = 0.0
    """Time of the last look at a server that lags or rests."""


class ReplicaSet:
    """The servers that a client may ask."""

    def __init__(self, urls: Iterable[str], *, max_version_skew: int, random_seed: int | None = None) -> None:
        """Pass over servers more than `max_version_skew` versions behind the newest; negative is no limit."""
        self.replicas = [Replica(url.rstrip("/")) for url in dict.fromkeys(urls)]
        self._max_version_skew = max_version_skew
        self._random = random.Random(random_seed)

    def use(self, urls: Iterable[str]) -> None:
        """Ask these servers from now on; what is known of those that stay is kept."""
        known = {replica.url: replica for replica in self.replicas}
        wanted = [url.rstrip("/") for url in dict.fromkeys(urls)]
        self.replicas = [known.get(url) or Replica(url) for url in wanted]

    @property
    def newest_version(self) -> int:
        """Newest policy version in any answer."""
        return max(replica.version for replica in self.replicas)

    def choose(self, session: str, now: float) -> Replica:
        """Return the server to ask for a session. If it rests, all do, and it is ready at its `ready_at`."""
        ranked = sorted(self.replicas, key=lambda replica: _weight(session, replica.url), reverse=True)
        return min(ranked, key=lambda r: (max(r.ready_at, now), r.failures > 0, self.lags(r)))

    def lags(self, replica: Replica) -> bool:
        """Whether a server is too far behind the newest version. One that names no version never is."""
        behind = self.newest_version - replica.version
        return replica.version >= 0 and 0 <= self._max_version_skew < behind

    def to_look_at(self, now: float) -> Sequence[Replica]:
        """Return the servers without requests that are due for a look: those that lag, or failed and have rested."""
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

    def answered(self, replica: Replica, version: int) -> None:
        """Note an answer and the newest version in it, -1 for none."""
        replica.failures, replica.ready_at = 0, 0.0
        replica.version = max(replica.version, version)

    def failed(self, replica: Replica, now: float, retry_after_s: float | None = None) -> None:
        """Note a failure: the server rests for as long as it asks, else for a random time, longer after each failure.

        Requests that fail together count as one failure.
        """
        if retry_after_s is None and now < replica.ready_at:
            return
        replica.failures += 1
        bound_s = min(_LONGEST_REST_S, _FIRST_REST_S * 2.0 ** min(replica.failures, 16))
        rest_s = self._random.uniform(bound_s / 2, bound_s) if retry_after_s is None else retry_after_s
        replica.ready_at = max(replica.ready_at, now + rest_s)


class RetryBudget:
    """Bounds the retries of all requests of a client together: a burst, then a rate.

    However many requests fail at once, servers that struggle are asked no faster than that.
    """

    def __init__(self, *, burst: int = 64, per_s: float = 10.0) -> None:
        self._burst = burst
        self._per_s = per_s
        self._left = float(burst)
        self._at = 0.0

    def reserve(self, now: float) -> float:
        """Reserve one retry; return the seconds until it may be made."""
        self._left = min(self._burst, self._left + max(0.0, now - self._at) * self._per_s) - 1.0
        self._at = max(self._at, now)
        return max(0.0, -self._left / self._per_s)


def _weight(session: str, url: str) -> bytes:
    return hashlib.blake2b(f"{session}\0{url}".encode(), digest_size=8).digest()
