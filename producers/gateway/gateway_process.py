"""Runs a gateway with its clients until it is stopped."""

import asyncio
import contextlib
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
from rollstream.producers.gateway.gateway_steering import GatewaySteering
from rollstream.producers.gateway.server import GatewayServer, serve_until
from rollstream.producers.gateway.upstream import Upstream
from rollstream.producers.metrics_publisher import MetricsPublisher
from rollstream.topics.config import KafkaConfig
from rollstream.topics.control.steering import SteeringFollower


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
