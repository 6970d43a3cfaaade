"""Runs a gateway with its clients until it is stopped."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from rollstream.producers.config import CapacityConfig, WorkerConfig
from rollstream.producers.flow.flow_control import RunProgress
from rollstream.producers.flow.policy_versions import PolicyFollower
from rollstream.producers.flow.tailers import JournalTailer
from rollstream.producers.gateway.call_log import CallLog
from rollstream.producers.gateway.capture import CaptureRules
from rollstream.producers.gateway.config import GatewayConfig
from rollstream.producers.gateway.gateway_parts import gateway_parts
from rollstream.producers.gateway.server import GatewayServer, serve_until
from rollstream.producers.gateway.service import SessionService
from rollstream.producers.gateway.upstream import Upstream
from rollstream.producers.metrics_publisher import MetricsPublisher
from rollstream.topics.config import KafkaConfig
from rollstream.topics.control.steering import SERVERS, WORKERS, DesiredState, SteeringFollower
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


async def run_gateway(
    kafka: KafkaConfig,
    run: str,
    config: GatewayConfig,
    worker: WorkerConfig,
    *,
    capacity: CapacityConfig | None,
    workers: int | None = None,
    servers: Callable[[int], Sequence[str]] | None = None,
    stop: asyncio.Event,
    listener: socket.socket | None = None,
    on_ready: Callable[[str], None] = lambda _url: None,
    on_progress: Callable[[str], object] = lambda _progress: None,
) -> None:
    """Run a gateway until `stop` is set; `on_ready` is called with its URL once it serves; before that, `on_progress`
    receives the progress of reading the calls on record.

    Servers, model, key, temperature and logprobs_mode come from `worker`. Without `capacity`, the only limit is
    gateway.max_sessions. `capacity` is shared with `workers`, or with the number of workers that operators request;
    `servers` returns the URLs for the number of inference servers that they request. `listener` is a socket that
    listens at the gateway's address already. Raises ConfigurationError, TopicError, BrokerUnavailable.
    """
    async with AsyncExitStack() as stack:
        read_progress: Callable[[], RunProgress] = RunProgress
        if capacity is not None:
            tailer = JournalTailer(kafka, run)
            stack.callback(tailer.close)
            await asyncio.to_thread(tailer.start)
            read_progress = lambda: tailer.progress  # noqa: E731
        steering = await asyncio.to_thread(SteeringFollower, kafka, run)
        stack.push_async_callback(asyncio.to_thread, steering.close)
        policies = stack.enter_context(await asyncio.to_thread(PolicyFollower, kafka, run))
        rules = CaptureRules(
            temperature=worker.temperature,
            sampling=config.sampling,
            max_calls=config.max_calls,
            author=config.replica_id,
        )
        parts = gateway_parts(
            kafka,
            run,
            config,
            worker,
            policies,
            rules,
            on_progress=on_progress,
            capacity=capacity,
            read_progress=read_progress,
            draining=lambda: steering.state.draining,
        )
        log, upstream, capture, service = await stack.enter_async_context(parts)
        assert isinstance(log, CallLog), "a gateway in its own process is recorded"
        steered = GatewaySteering(upstream, service, capacity, workers=workers, servers=servers)
        follows = _look_for_versions(upstream, lambda: steered.follow(steering.state), stop)
        beside = {asyncio.ensure_future(work) for work in (service.attend(stop), follows)}
        server = await stack.enter_async_context(GatewayServer(service, capture, upstream, config, listener))
        await stack.enter_async_context(
            MetricsPublisher(
                kafka, run, config.replica_id, "gateway", server.metrics, interval_s=config.metrics_interval_s
            )
        )
        on_ready(server.url)
        await _until_served(asyncio.ensure_future(serve_until(stop, log.failed)), beside)
        if log.error is not None:
            raise log.error


async def _until_served(serving: "asyncio.Task[None]", beside: "set[asyncio.Task[None]]") -> None:
    """Wait for `serving`; raise an error of a background task at once, because a gateway needs all of them."""
    try:
        while not serving.done():
            done, _pending = await asyncio.wait({serving, *beside}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            beside = beside - done
    finally:
        for task in (serving, *beside):
            task.cancel()
        await asyncio.gather(serving, *beside, return_exceptions=True)


_LOOK_EVERY_S = 1.0


async def _look_for_versions(upstream: Upstream, follow: Callable[[], None], stop: asyncio.Event) -> None:
    """Follow the operators' requests, and keep the newest policy version up to date, because groups are stamped with
    it."""
    while not stop.is_set():
        follow()
        await upstream.version()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _LOOK_EVERY_S)
