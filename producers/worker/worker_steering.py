"""Applies operators' requests to a running worker: the environments that it plays and their weights, the number of
workers that share the capacity, and the number of inference servers."""

import logging
from collections.abc import Callable, Mapping, Sequence

from rollstream.producers.flow.flow_control import FlowControl
from rollstream.producers.flow.mixture import Mixture
from rollstream.producers.inference.client import CompletionsClient
from rollstream.producers.worker.local_gateway import LocalGateway
from rollstream.topics.control.steering import SERVERS, WORKERS, DesiredState, SteeringFollower
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)


class WorkerSteering:
    """Applies the desired state of a run to a worker."""

    def __init__(
        self,
        follower: SteeringFollower,
        mixture: Mixture,
        client: CompletionsClient,
        flow: FlowControl | None,
        *,
        workers: int,
        gateway: LocalGateway | None = None,
        servers: Callable[[int], Sequence[str]] | None = None,
        follow: Callable[[Mapping[str, int]], None] = lambda _numbers: None,
    ) -> None:
        """The worker is one of `workers`, unless operators request another number. `gateway` takes the calls of its
        agents. `servers` returns the URLs for a number of inference servers; without it, the servers stay as
        configured. `follow` is called with the numbers that operators want."""
        self._follow = follow
        self._follower, self._mixture, self._client, self._flow = follower, mixture, client, flow
        self._gateway = gateway
        self._workers, self._servers = workers, servers
        self._others = flow.config.workers - workers if flow else 0
        self._configured = client.urls
        self._adjusted: tuple[set[str], dict[str, float]] = set(), {}
        self._seen: DesiredState | None = None

    @property
    def draining(self) -> bool:
        """Whether the run is being drained, so that no group begins."""
        return self._follower.state.draining

    def follow(self) -> None:
        """Apply the newest desired state. Call it often."""
        state = self._follower.state
        if state is self._seen:
            return
        self._seen = state
        self._follow(state.numbers)
        played = {environment.name for environment in self._mixture.environments}
        paused, weights = played & state.paused.keys(), {n: w for n, w in state.weights.items() if n in played}
        if (paused, weights) != self._adjusted:
            self._adjusted = paused, weights
            self._mixture.adjust(paused, weights)
            event(logger, "mixture_adjusted", paused=sorted(paused), weights=weights)
        self._share(state.numbers.get(WORKERS, self._workers))
        if self._servers is not None:
            wanted = state.numbers.get(SERVERS)
            urls = self._configured if not wanted else self._servers(wanted)
            self._client.ask(urls)
            if self._gateway is not None:
                self._gateway.use(urls)

    def _share(self, workers: int) -> None:
        if self._flow is None or self._flow.config.workers == workers + self._others:
            return
        try:
            self._flow.share_with(workers + self._others)
        except ConfigurationError as error:
            event(logger, "capacity_not_shared", level=logging.WARNING, workers=workers, error=str(error))
            return
        event(logger, "capacity_shared", workers=workers)
