"""Runs an environment worker with its clients: inference, producer, flow control, curriculum and metrics."""

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack

from rollstream.producers.config import CapacityConfig, CurriculumConfig, WorkerConfig
from rollstream.producers.flow.mixture import Mixture
from rollstream.producers.flow.mixture_states import MixtureStates
from rollstream.producers.flow.policy_versions import PolicyFollower
from rollstream.producers.flow.tailers import open_flow
from rollstream.producers.gateway.config import GatewayConfig
from rollstream.producers.inference.client import client_of
from rollstream.producers.metrics_publisher import MetricsPublisher
from rollstream.producers.record_sender import RolloutDelivery
from rollstream.producers.tasks.environment_loading import LoadedEnvironment
from rollstream.producers.worker.local_gateway import LocalGateway
from rollstream.producers.worker.rollout_outlet import RolloutOutlet
from rollstream.producers.worker.worker import Worker, WorkerReport
from rollstream.producers.worker.worker_steering import WorkerSteering
from rollstream.topics.config import KafkaConfig
from rollstream.topics.control.steering import WORKERS, SteeringFollower


async def run_worker(
    environments: Sequence[LoadedEnvironment],
    kafka: KafkaConfig,
    run: str,
    config: WorkerConfig,
    *,
    incarnation: str,
    group_secret: bytes = b"",
    ordinal: int = 0,
    workers: int = 1,
    curriculum: CurriculumConfig | None = None,
    capacity: CapacityConfig | None = None,
    labeling_group: str = "",
    servers: Callable[[int], Sequence[str]] | None = None,
    gateway: GatewayConfig | None = None,
    follow: Callable[[Mapping[str, int]], None] = lambda _numbers: None,
    stop: asyncio.Event | None = None,
) -> WorkerReport:
    """Run one worker with its clients until `stop` is set; without `stop`, until SIGTERM or SIGINT arrives.

    `incarnation` must differ at each start of a worker, because it keeps uids unique. With a `group_secret`, ids of
    groups cannot be guessed. `ordinal` is the worker's index among the `workers` that share the prompts; operators
    may request another number of workers. Without `capacity`, production is not limited. `labeling_group` is the full
    name of the labelers' consumer group, for environments whose rewards come from a labeler. `servers` returns the URLs
    for a number of inference servers, and is called when operators change this number. `gateway` are the settings
    of the gateway for agents. `follow` is called with the numbers that operators want, whenever these may have
    changed. Raises ConfigurationError, TopicError, BrokerUnavailable, InferenceUnavailable, InferenceRefused,
    DeliveryError.
    """
    curriculum = curriculum or CurriculumConfig()
    stop = stop or _stop_on_signals()
    with ExitStack() as stack:
        states = stack.enter_context(await asyncio.to_thread(MixtureStates, kafka, run, config.worker_id))
        follower = stack.enter_context(await asyncio.to_thread(SteeringFollower, kafka, run))
        mixture = Mixture(
            environments,
            seed=config.seed,
            worker=ordinal,
            workers=follower.state.numbers.get(WORKERS, workers),
            curriculum=curriculum,
            state=states.own,
        )
        labeled = [environment.name for environment in environments if environment.awaits_label]
        flow, read_progress = await open_flow(stack, kafka, run, capacity, labeled, labeling_group)

        def delivered(delivery: RolloutDelivery) -> None:
            if flow is not None:
                flow.note_delivery(delivery.partition, delivery.offset, delivery.environment)

        def waits(delivery: RolloutDelivery) -> None:
            if flow is not None:
                flow.note_unlabeled(delivery.partition, delivery.offset, delivery.environment)

        outlet = stack.enter_context(
            RolloutOutlet(kafka, run, labeled=labeled, on_delivery=delivered, on_unlabeled=waits)
        )
        policies = stack.enter_context(PolicyFollower(kafka, run))
        async with client_of(config, policies) as client, AsyncExitStack() as opened:
            agents = None
            if any(environment.agent is not None for environment in environments):
                agents = LocalGateway(
                    kafka,
                    run,
                    config,
                    gateway or GatewayConfig(),
                    name=config.worker_id,
                    policies=policies,
                    temperatures={environment.name: environment.temperature for environment in environments},
                )
                await opened.enter_async_context(agents)
            worker = Worker(
                mixture,
                client,
                outlet,
                config,
                incarnation=incarnation,
                group_secret=group_secret,
                flow=flow,
                gateway=agents,
                read_progress=read_progress,
                steering=WorkerSteering(
                    follower, mixture, client, flow, workers=workers, gateway=agents, servers=servers, follow=follow
                ),
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


async def _keep_states(mixture: Mixture, states: MixtureStates, interval_s: float) -> None:
    """Write the mixture's state, and read the other workers' states, at regular intervals."""
    while True:
        mixture.note_others(await asyncio.to_thread(states.others))
        await asyncio.sleep(interval_s)
        await asyncio.to_thread(states.write, mixture.states())


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop
