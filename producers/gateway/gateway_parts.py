"""The parts of a gateway, which a gateway in its own process and one inside a worker share."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, NamedTuple

from rollstream.producers.config import WorkerConfig
from rollstream.producers.flow.policy_versions import PolicySource
from rollstream.producers.gateway.call_log import CallLog
from rollstream.producers.gateway.capture import CallCapture, CaptureRules
from rollstream.producers.gateway.config import GatewayConfig
from rollstream.producers.gateway.episode_rollouts import RolloutForm
from rollstream.producers.gateway.memory_log import MemoryLog, MemoryWriter
from rollstream.producers.gateway.rollout_writing import RolloutWriter
from rollstream.producers.gateway.service import EpisodeWriter, SessionService
from rollstream.producers.gateway.sessions import CapturedSession
from rollstream.producers.gateway.upstream import Upstream
from rollstream.topics.config import KafkaConfig
from rollstream.topics.records import Rollout
from rollstream.topics.traces.stages import call_recorded


class GatewayParts(NamedTuple):
    """A gateway without its HTTP side."""

    log: CallLog | MemoryLog
    upstream: Upstream
    capture: CallCapture
    service: SessionService


@asynccontextmanager
async def gateway_parts(
    kafka: KafkaConfig,
    run: str,
    config: GatewayConfig,
    worker: WorkerConfig,
    policies: PolicySource,
    rules: CaptureRules,
    *,
    recorded: bool = True,
    shared: bool = True,
    on_written: Callable[[CapturedSession, Sequence[Rollout]], None] = lambda _session, _rollouts: None,
    on_progress: Callable[[str], object] = lambda _progress: None,
    **limits: Any,
) -> AsyncIterator[GatewayParts]:
    """Yield the parts of a gateway that has read `calls`, or of one in memory if it is not `recorded`.

    `shared`, `on_written` and `on_progress` are those of CallLog, RolloutWriter and CallLog.start; `limits` are
    arguments of SessionService. Raises ConfigurationError, TopicError, BrokerUnavailable.
    """
    form = RolloutForm(
        logprobs_mode=worker.logprobs_mode, temperature=worker.temperature, assume_version=worker.assume_version
    )
    async with AsyncExitStack() as stack:

        def on_read(session: CapturedSession) -> None:
            service.read(session)
            if session.finished is not None:
                capture.forget(session.name)

        log: CallLog | MemoryLog
        writer: EpisodeWriter
        if recorded:
            log = CallLog(
                kafka,
                run,
                author=config.replica_id,
                remembered_sessions=config.remembered_sessions,
                on_read=on_read,
                shared=shared,
            )
            stack.push_async_callback(log.close)
            await asyncio.to_thread(policies.read, 0.0)
            writer = RolloutWriter(
                kafka,
                run,
                log,
                form,
                policies,
                author=config.replica_id,
                takeover_s=config.takeover_s,
                on_written=on_written,
            )
            stack.push_async_callback(writer.close)
        else:
            log = MemoryLog()
            writer = MemoryWriter(log, form, policies, on_written)
        upstream = await stack.enter_async_context(
            Upstream(
                worker.inference_urls,
                model=worker.model,
                api_key=worker.api_key,
                timeout_s=worker.request_timeout_s,
                policies=policies,
                max_version_skew=worker.max_version_skew,
            )
        )
        traced = (partial(call_recorded, run, worker.model),) if recorded else ()
        capture = CallCapture(upstream, log, rules, *traced)
        service = SessionService(log, writer, upstream, config, assume_version=worker.assume_version, **limits)
        if isinstance(log, CallLog):
            await log.start(on_progress)
        yield GatewayParts(log, upstream, capture, service)
