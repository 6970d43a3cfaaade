"""Runs an environment worker with its clients: inference, producer, flow control, curriculum and metrics."""

import asyncio
import signal
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace

from rollstream.producers.config import CapacityConfig, CurriculumConfig, WorkerConfig
from rollstream.producers.dual_writer import DualWriter
from rollstream.producers.environment_loading import LoadedEnvironment
from rollstream.producers.flow_control import FlowControl, RunProgress
from rollstream.producers.gateway.left_episodes import end_left_episodes
from rollstream.producers.gateway.worker_capture import WorkerCapture
from rollstream.producers.inference.client import client_of
from rollstream.producers.journal_tailer import JournalTailer
from rollstream.producers.metrics_publisher import MetricsPublisher
from rollstream.producers.mixture import Mixture
from rollstream.producers.mixture_states import MixtureStates
from rollstream.producers.policy_versions import PolicyFollower
from rollstream.producers.record_sender import RolloutDelivery
from rollstream.producers.rollout_producer import RolloutProducer
from rollstream.producers.worker import Worker, WorkerReport
from rollstream.topics.config import KafkaConfig


async def run_worker(
    environments: Sequence[LoadedEnvironment],
    kafka: KafkaConfig,
    run: str,
    config: WorkerConfig,
    *,
    incarnation: str,
    ordinal: int = 0,
    workers: int = 1,
    curriculum: CurriculumConfig | None = None,
    capacity: CapacityConfig | None = None,
    stop: asyncio.Event | None = None,
) -> WorkerReport:
    """Run one worker with its clients until `stop` is set; without `stop`, until SIGTERM or SIGINT arrives.

    `incarnation` must differ at each start of a worker: it keeps uids unique. `ordinal` is its number of `workers`,
    which share the prompts. Without `capacity` there is no limit. Raises ConfigurationError, TopicError,
    BrokerUnavailable, InferenceUnavailable, InferenceRefused, DeliveryError.
    """
    curriculum = curriculum or CurriculumConfig()
    stop = stop or _stop_on_signals()
    with ExitStack() as stack:
        states = stack.enter_context(await asyncio.to_thread(MixtureStates, kafka, run, config.worker_id))
        mixture = Mixture(
            environments,
            seed=config.seed,
            worker=ordinal,
            workers=workers,
            curriculum=curriculum,
            state=states.own,
        )
        flow, read_progress = await _flow_control(stack, kafka, run, capacity)
        undelivered: set[str] = set()

        def delivered(delivery: RolloutDelivery) -> None:
            undelivered.discard(delivery.uid)
            if flow is not None:
                flow.note_delivery(delivery.partition, delivery.offset, delivery.environment)

        producer = stack.enter_context(RolloutProducer(kafka, run, on_delivery=delivered))
        policies = stack.enter_context(PolicyFollower(kafka, run))
        topic = config.dual_write_topic
        async with client_of(config, policies) as client, AsyncExitStack() as opened:
            captures = {}
            author = f"{config.worker_id}.{incarnation}"
            if any(environment.agent is not None for environment in environments):
                await end_left_episodes(kafka, run, config, author=author, producer=producer)
            for environment in environments:
                if environment.agent is not None:
                    settings = replace(config, temperature=environment.temperature)
                    capture = WorkerCapture(kafka, run, settings, policies=policies, author=author)
                    captures[environment.name] = await opened.enter_async_context(capture)
            worker = Worker(
                mixture,
                client,
                producer,
                config,
                incarnation=incarnation,
                flow=flow,
                captures=captures,
                undelivered=undelivered,
                read_progress=read_progress,
                dual=stack.enter_context(DualWriter(kafka, topic)) if topic else None,
            )
            publisher = MetricsPublisher(
                kafka, run, config.worker_id, "env", worker.metrics, interval_s=config.metrics_interval_s
            )
            async with publisher:
                keeping = asyncio.create_task(_keep_states(mixture, states, curriculum.state_interval_s))
                try:
                    return await worker.run(stop)
                finally:
                    keeping.cancel()
                    await asyncio.gather(keeping, return_exceptions=True)
                    await asyncio.to_thread(states.write, mixture.states())


async def _flow_control(
    stack: ExitStack, kafka: KafkaConfig, run: str, capacity: CapacityConfig | None
) -> tuple[FlowControl | None, Callable[[], RunProgress] | None]:
    """Return the flow control and a reader of the run's progress; `stack` closes the client. None without capacity."""
    if capacity is None:
        return None, None
    tailer = JournalTailer(kafka, run)
    stack.callback(tailer.close)
    await asyncio.to_thread(tailer.start)
    return FlowControl(capacity, tailer.rollout_ends), lambda: tailer.progress


async def _keep_states(mixture: Mixture, states: MixtureStates, interval_s: float) -> None:
    """Write the mixture's state and take over the other workers' at regular intervals."""
    while True:
        mixture.curriculum.note_others(await asyncio.to_thread(states.others))
        await asyncio.sleep(interval_s)
        await asyncio.to_thread(states.write, mixture.states())


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop
