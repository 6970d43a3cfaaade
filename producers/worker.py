"""The environment worker: groups in flight, scored and written whole, within the capacity rule.

A group gets its id and policy version once, when its generation begins. Members that will never come, by a fault or a
shutdown, are cancelled on the log, so that no consumer waits for them.
"""

import asyncio
import contextlib
import hashlib
import logging
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from producers.assembly import Stamp, rollout_of, uids_of
from producers.capacity import FlowControl, Progress
from producers.config import CapacityConfig, WorkerConfig
from producers.dual_writer import DualWriter
from producers.environment import Environment, Episode, Prompt
from producers.inference.batching import row_seed
from producers.inference.client import CompletionsClient, InferenceUnavailable
from producers.journal_tailer import JournalTailer
from producers.rollout_producer import RolloutProducer
from producers.sampling import GroupSampler, Sampling
from producers.sending import Delivery
from topics.config import KafkaConfig
from topics.errors import DeadlineExceeded, RecordError, RollstreamError
from topics.logs import event
from topics.records import GroupCancelled, Rollout, RolloutMetadata

logger = logging.getLogger(__name__)
_TICK_S = 0.01
_LEAST_FLUSH_S = 5.0
_REPORT_EVERY_S = 10.0
_PASSING = (InferenceUnavailable, RecordError)
"""Errors that cost a group its members; any other ends the worker."""


@dataclass(frozen=True, kw_only=True)
class WorkerReport:
    """What a worker did; means are over the rollouts sent."""

    groups: int = 0
    rollouts: int = 0
    cancelled: int = 0
    reward: float = 0.0
    components: Mapping[str, float] = field(default_factory=dict)


async def run_worker(
    environment: Environment,
    kafka: KafkaConfig,
    run: str,
    config: WorkerConfig,
    *,
    incarnation: str,
    capacity: CapacityConfig | None = None,
    stop: asyncio.Event | None = None,
) -> WorkerReport:
    """Run one worker with all it needs until `stop` is set, or SIGTERM or SIGINT arrives where none is given.

    `incarnation` must differ at each start of a worker: it keeps uids unique. Without `capacity` nothing holds it back.
    Raises ConfigurationError, TopicError, BrokerUnavailable, InferenceUnavailable, InferenceRefused, DeliveryError.
    """
    stop = stop or _stop_on_signals()
    with ExitStack() as stack:
        flow, read_progress = None, None
        if capacity is not None:
            tailer = JournalTailer(kafka, run)
            stack.callback(tailer.close)
            await asyncio.to_thread(tailer.start)
            flow = FlowControl(capacity, tailer.rollout_ends)
            read_progress = lambda: tailer.progress  # noqa: E731

        def delivered(delivery: Delivery) -> None:
            if flow is not None:
                flow.delivered(delivery.partition, delivery.offset)

        producer = stack.enter_context(RolloutProducer(kafka, run, on_delivery=delivered))
        async with CompletionsClient(
            config.inference_urls, model=config.model, api_key=config.api_key, timeout_s=config.request_timeout_s
        ) as client:
            topic = config.dual_write_topic
            worker = Worker(
                environment,
                client,
                producer,
                config,
                incarnation=incarnation,
                flow=flow,
                read_progress=read_progress,
                dual=stack.enter_context(DualWriter(kafka, topic)) if topic else None,
            )
            return await worker.run(stop)


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


class Worker:
    """Plays an environment and writes its rollouts."""

    def __init__(
        self,
        environment: Environment,
        client: CompletionsClient,
        producer: RolloutProducer,
        config: WorkerConfig,
        *,
        incarnation: str,
        flow: FlowControl | None = None,
        read_progress: Callable[[], Progress] | None = None,
        dual: DualWriter | None = None,
    ) -> None:
        """With `flow`, deliveries of the producer must reach it, and `read_progress` gives the newest progress.

        `dual` gets each group in the old form, too.
        """
        self._environment = environment
        self._client = client
        self._producer = producer
        self._config = config
        self._name = f"{config.worker_id}.{incarnation}"
        self._flow = flow
        self._read_progress = read_progress
        self._dual = dual
        self._prompts = environment.prompts("train")
        seed = hashlib.sha256(f"{config.seed}/{self._name}".encode()).digest()
        self._random = random.Random(seed)
        self._started = 0
        self._sent = 0
        self._cancelled = 0
        self._reward = 0.0
        self._components: Counter[str] = Counter()
        self._reported = time.monotonic()

    @property
    def report(self) -> WorkerReport:
        """What was done so far."""
        sent = max(self._sent, 1)
        return WorkerReport(
            groups=self._started,
            rollouts=self._sent,
            cancelled=self._cancelled,
            reward=self._reward / sent,
            components={name: total / sent for name, total in sorted(self._components.items())},
        )

    async def run(self, stop: asyncio.Event) -> WorkerReport:
        """Start groups until `stop` is set or config.groups are started; finish those in flight; flush."""
        tasks: set[asyncio.Task[None]] = set()
        try:
            if await self._knows_a_version(stop):
                while not stop.is_set() and not self._all_started:
                    tasks = self._reap(tasks)
                    while len(tasks) < self._config.concurrency and not self._all_started and self._has_room():
                        tasks.add(asyncio.create_task(self._group(self._started)))
                        self._started += 1
                    await self._pause(tasks)
            deadline = time.monotonic() + self._config.drain_timeout_s
            # Without a signal there is no hurry: only a shutdown has a deadline.
            while tasks and (not stop.is_set() or time.monotonic() < deadline):
                await self._pause(tasks)
                tasks = self._reap(tasks)
        finally:
            for task in tasks:
                task.cancel()
            # Their errors are second to the one under way; each has cancelled its group on the log.
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self._producer.flush, max(_LEAST_FLUSH_S, deadline - time.monotonic()))
        self._log("worker_stopped")
        return self.report

    @property
    def _all_started(self) -> bool:
        return 0 < self._config.groups <= self._started

    def _has_room(self) -> bool:
        if self._flow is None or self._read_progress is None:
            return True
        self._flow.observe(self._read_progress())
        return self._flow.start_group()

    def _reap(self, tasks: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
        """The tasks still running; raises what ended one. Delivery reports are served here too."""
        self._producer.poll()
        if time.monotonic() - self._reported > _REPORT_EVERY_S:
            self._reported = time.monotonic()
            self._log("worker_progress")
        running = {task for task in tasks if not task.done()}
        for task in tasks - running:
            task.result()
        return running

    async def _pause(self, tasks: set[asyncio.Task[None]]) -> None:
        if tasks:
            await asyncio.wait(tasks, timeout=_TICK_S, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(_TICK_S)

    async def _knows_a_version(self, stop: asyncio.Event) -> bool:
        """Wait until a server says its policy version; False when `stop` comes first."""
        asking = asyncio.ensure_future(self._first_version())
        stopping = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({asking, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                asking.result()
            return asking.done() and not stop.is_set()
        finally:
            asking.cancel()
            stopping.cancel()

    async def _first_version(self) -> None:
        deadline = time.monotonic() + self._config.request_timeout_s
        while self._config.assume_version < 0 and await self._client.version() < 0:
            if time.monotonic() > deadline:
                raise InferenceUnavailable(
                    f"{', '.join(self._config.inference_urls)} named no policy version within "
                    f"{self._config.request_timeout_s:g} s; is the learner publishing, or set worker.assume_version"
                )
            await asyncio.sleep(0.1)

    async def _group(self, number: int) -> None:
        """The group of that number, from its prompt to its records."""
        config = self._config
        prompt = self._prompts[self._random.randrange(len(self._prompts))]
        stamp = Stamp(
            environment=self._environment.name,
            group_id=f"{self._name}.{number}",
            group_size=config.group_size,
            policy_version=max(self._client.newest_version, config.assume_version),
            temperature=config.temperature,
            logprobs_mode=config.logprobs_mode,
            worker_id=config.worker_id,
        )
        unsent = list(uids_of(stamp.group_id, config.group_size))
        sent: list[Rollout] = []
        try:
            episodes = await self._episodes(prompt, row_seed(config.seed, stamp.group_id) >> 1)
            failures = [episode for episode in episodes if not isinstance(episode, Episode)]
            for uid, episode in zip(tuple(unsent), episodes, strict=True):
                if isinstance(episode, Episode):
                    try:
                        rollout = rollout_of(episode, prompt, stamp, uid=uid, timestamp=time.time())
                        await self._send(rollout)
                        unsent.remove(uid)
                        sent.append(rollout)
                    except RecordError as error:
                        failures.append(error)
            if self._dual is not None:
                self._dual.write([sent])
            if failures:
                raise next((f for f in failures if not isinstance(f, _PASSING)), failures[0])
        except _PASSING as error:
            event(logger, "group_failed", level=logging.WARNING, group_id=stamp.group_id, error=str(error))
            self._cancel(prompt, stamp, unsent, str(error))
        except BaseException as error:
            reason = "the worker is stopping" if isinstance(error, asyncio.CancelledError) else repr(error)
            # Best effort: the error under way is what counts.
            with contextlib.suppress(RollstreamError):
                self._cancel(prompt, stamp, unsent, reason)
            raise

    async def _episodes(self, prompt: Prompt, seed: int) -> Sequence[Episode | BaseException]:
        sampling = Sampling(
            group_size=self._config.group_size,
            temperature=self._config.temperature,
            seed=seed,
            assume_version=self._config.assume_version,
        )
        sampler = GroupSampler(self._client, self._environment, sampling)
        try:
            return await asyncio.gather(
                *(self._environment.run(prompt, sampler.member(i)) for i in range(sampling.group_size)),
                return_exceptions=True,
            )
        finally:
            sampler.close()

    async def _send(self, rollout: Rollout) -> None:
        deadline = time.monotonic() + self._producer.send_timeout_s
        while True:
            try:
                self._producer.send(rollout, timeout_s=0.0)
                break
            except DeadlineExceeded:
                # The queue is full: let other groups go on while the broker catches up.
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_TICK_S)
        self._sent += 1
        self._reward += rollout.reward
        self._components.update(rollout.reward_components)

    def _cancel(self, prompt: Prompt, stamp: Stamp, uids: Sequence[str], reason: str) -> None:
        if not uids:
            return
        if self._flow is not None:
            self._flow.given_up(len(uids))
        self._cancelled += len(uids)
        self._producer.cancel(
            GroupCancelled(
                environment=stamp.environment,
                example_id=prompt.example_id,
                policy_version=stamp.policy_version,
                group_size=stamp.group_size,
                uids=tuple(uids),
                group_id=stamp.group_id,
                reason=reason,
                metadata=RolloutMetadata(worker_id=stamp.worker_id, timestamp=time.time()),
            ),
            timeout_s=1.0,
        )

    def _log(self, name: str) -> None:
        report = self.report
        fields: dict[str, object] = {key: round(value, 4) for key, value in report.components.items()}
        fields |= {
            "worker_id": self._config.worker_id,
            "groups": report.groups,
            "rollouts": report.rollouts,
            "cancelled": report.cancelled,
            "reward": round(report.reward, 4),
            "version": self._client.newest_version,
        }
        if self._flow is not None:
            # What to look at when a worker produces nothing: it waits for these to fall.
            fields |= {"outstanding": self._flow.outstanding, "mine_unseen": self._flow.mine_unseen}
            fields["records_skipped"] = self._flow.records_skipped
        event(logger, name, totals=fields)
