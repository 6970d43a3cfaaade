"""Applies operators' requests to a running gateway: the number of workers that share the capacity, and the number of
inference servers."""

import logging
from collections.abc import Callable, Sequence

from rollstream.producers.config import CapacityConfig
from rollstream.producers.gateway.service import SessionService
from rollstream.producers.gateway.upstream import Upstream
from rollstream.topics.control.steering import SERVERS, WORKERS, DesiredState
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)


class GatewaySteering:
    """Applies the desired state of a run to a gateway."""

    def __init__(
        self,
        upstream: Upstream,
        service: SessionService,
        capacity: CapacityConfig | None,
        *,
        workers: int | None = None,
        servers: Callable[[int], Sequence[str]] | None = None,
    ) -> None:
        """`capacity` is shared by `workers`, unless operators request another number, and the gateways. `servers`
        returns the URLs for a number of inference servers. Without either, the capacity or the servers stay as
        configured."""
        self._upstream, self._service = upstream, service
        self._workers, self._servers = workers, servers
        self._others = capacity.workers - workers if capacity and workers is not None else 0
        self._configured = upstream.urls
        self._seen: DesiredState | None = None

    def follow(self, state: DesiredState) -> None:
        """Apply the desired state. Call it often."""
        if state is self._seen:
            return
        self._seen = state
        if self._workers is not None:
            self._share(state.numbers.get(WORKERS, self._workers))
        if self._servers is not None:
            wanted = state.numbers.get(SERVERS)
            self._upstream.use(self._servers(wanted) if wanted else self._configured)

    def _share(self, workers: int) -> None:
        try:
            self._service.share_with(workers + self._others)
        except ConfigurationError as error:
            event(logger, "capacity_not_shared", level=logging.WARNING, workers=workers, error=str(error))
