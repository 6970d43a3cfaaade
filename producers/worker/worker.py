"""The environment worker: plays groups of a mixture concurrently and writes them whole, within the capacity rule.

A group gets its id and policy version once, when its generation begins. If a fault or a shutdown prevents members of a
group, the worker cancels these members on the log, so that no consumer waits for them.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rollstream.producers.config import WorkerConfig
from rollstream.producers.environments.environment import Episode, Prompt
from rollstream.producers.flow.component_means import ComponentMeans
from rollstream.producers.flow.flow_control import FlowControl, RunProgress
from rollstream.producers.flow.mixture import Mixture
from rollstream.producers.gateway.service import WrittenRollouts
from rollstream.producers.inference.client import CompletionsClient
from rollstream.producers.inference.decoding import row_seed
from rollstream.producers.inference.errors import ContextTooLong, InferenceRefused, InferenceUnavailable
from rollstream.producers.inference.requests import Filters
from rollstream.producers.tasks.environment_loading import LoadedEnvironment
from rollstream.producers.worker.agent_player import PlayedEpisode, play_agents
from rollstream.producers.worker.group_player import EpisodeFailed, EpisodeLimits, finish_or_stop, play_group
from rollstream.producers.worker.local_gateway import LocalGateway
from rollstream.producers.worker.rollout_assembly import GroupStamp, rollout_of, uids_of
from rollstream.producers.worker.rollout_outlet import RolloutOutlet
from rollstream.producers.worker.sampling import GroupSampling
from rollstream.producers.worker.worker_steering import WorkerSteering
from rollstream.topics.errors import DeadlineExceeded, RecordError, RollstreamError
from rollstream.topics.heartbeats import beat
from rollstream.topics.logs import event
from rollstream.topics.records import GroupCancelled, Rollout, RolloutMetadata
from rollstream.topics.records.fates import clip

logger = logging.getLogger(__name__)
_TICK_S = 0.01
_LEAST_FLUSH_S = 5.0
_GIVE_UP_S = 1.0
_REASON_LIMIT = 4096
_REPORT_EVERY_S = 10.0
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
"""Longest pause of an environment whose groups fail as a whole; the pause doubles with each such group in a row."""
_PASSING = (InferenceUnavailable, RecordError, EpisodeFailed, ContextTooLong)
"""Errors that only cancel members of a group; `_passes` adds InferenceRefused after the first rollout. Any other error
ends the worker."""


@dataclass(frozen=True, kw_only=True)
class WorkerReport:
    """Totals of a worker; means are over the rollouts that were sent with a reward."""

    groups: int = 0
    rollouts: int = 0
    cancelled: int = 0
    reward: float = 0.0
    components: Mapping[str, float] = field(default_factory=dict)


class Worker:
    """Plays a mixture of environments and writes its rollouts."""

    def __init__(
        self,
        mixture: Mixture,
        client: CompletionsClient,
        outlet: RolloutOutlet,
        config: WorkerConfig,
        *,
        incarnation: str,
        group_secret: bytes = b"",
        gateway: LocalGateway | None = None,
        flow: FlowControl | None = None,
        read_progress: Callable[[], RunProgress] | None = None,
        steering: WorkerSteering | None = None,
    ) -> None:
        """The caller reports the outlet's deliveries to `flow`, if given; `read_progress` returns the run's progress.

        `gateway` takes the calls of environments that call the policy themselves. `steering` applies the operators'
        requests.
        """
        self._gateway = gateway
        self._mixture = mixture
        self._client = client
        self._outlet = outlet
        self._config = config
        self._name = f"{config.worker_id}.{incarnation}"
        self._group_secret = group_secret
        self._origin = {"host": socket.gethostname(), "process": str(os.getpid())}
        self._flow = flow
        self._read_progress = read_progress
        self._steering = steering
        self._failed_groups: Counter[str] = Counter()
        """Number of groups in a row in which every member failed, by environment."""
        self._paused_until_s: dict[str, float] = {}
        self._started = 0
        self._sent = 0
        self._scored = 0
        self._cancelled = 0
        self._failed = 0
        self._tokens = 0
        self._in_flight = 0
        self._waited_s = 0.0
        self._waiting_since_s: float | None = None
        self._reward = 0.0
        self._components = ComponentMeans()
        self._reported = time.monotonic()

    @property
    def report(self) -> WorkerReport:
        """Totals so far."""
        scored = max(self._scored, 1)
        return WorkerReport(
            groups=self._started,
            rollouts=self._sent,
            cancelled=self._cancelled,
            reward=self._reward / scored,
            components=self._components.means(),
        )

    def metrics(self) -> dict[str, float]:
        """Metrics by name: totals since the start, whose names end in _total, and the current state."""
        waiting = self._waiting_since_s is not None
        now_s = time.monotonic()
        values: dict[str, float] = {
            "groups_total": self._started,
            "rollouts_total": self._sent,
            "tokens_total": self._tokens,
            "cancelled_total": self._cancelled,
            "failed_total": self._failed,
            "capacity_wait_seconds_total": self._waited_s + (now_s - (self._waiting_since_s or now_s)),
            "waiting_for_capacity": waiting,
            "groups_in_flight": self._in_flight,
            "reward_mean": self.report.reward,
            "policy_version": self._newest_version(self._gateway),
        }
        if self._flow is not None:
            values |= {"outstanding": self._flow.outstanding, "mine_unseen": self._flow.mine_unseen}
            values["records_skipped_total"] = self._flow.records_skipped
            values["waiting_for_labels"] = self._flow.waiting_for_labels
        return values

    async def run(self, stop: asyncio.Event) -> WorkerReport:
        """Start groups until `stop` is set, config.groups are started, or the run is drained; then finish the groups
        in flight and flush. Groups that are not finished config.drain_timeout_s after `stop` is set are cancelled."""
        tasks: set[asyncio.Task[None]] = set()
        try:
            if await self._knows_a_version(stop):
                while not stop.is_set() and not self._ends:
                    tasks = self._reap(tasks)
                    while len(tasks) < self._config.concurrency and not self._ends:
                        environment = self._next()
                        if environment is None:
                            break
                        prompt = self._mixture.start(environment)
                        tasks.add(asyncio.create_task(self._group(self._started, environment, prompt)))
                        self._started += 1
                    await self._pause(tasks)
            # Only a shutdown has a deadline, which does not depend on when the last group began.
            while tasks and not stop.is_set():
                await self._pause(tasks)
                tasks = self._reap(tasks)
            deadline = time.monotonic() + self._config.drain_timeout_s
            while tasks and time.monotonic() < deadline:
                await self._pause(tasks)
                tasks = self._reap(tasks)
        finally:
            for task in tasks:
                task.cancel()
            # Their errors matter less than the one being raised; each task has cancelled its group on the log.
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self._outlet.flush, max(_LEAST_FLUSH_S, deadline - time.monotonic()))
        self._log("worker_stopped")
        return self.report

    @property
    def _ends(self) -> bool:
        """Whether no further group begins."""
        drains = self._steering is not None and self._steering.draining
        return drains or 0 < self._config.groups <= self._started

    def _next(self) -> LoadedEnvironment | None:
        """Return the environment that begins the next group, with room reserved for it; None if none may begin now."""
        if self._flow is not None and self._read_progress is not None:
            self._flow.observe(self._read_progress())
        now_s = time.monotonic()
        chosen = None
        candidates = [e for e in self._mixture.candidates() if self._paused_until_s.get(e.name, now_s) <= now_s]
        for environment in candidates:
            if self._flow is None or self._flow.start_group(environment.name, environment.group_size):
                chosen = environment
                break
            if environment.entry.quota == 1.0:
                # The run has no room, and smaller groups of other environments must not overtake this group.
                break
        if self._waiting_since_s is not None:
            self._waited_s += now_s - self._waiting_since_s
        self._waiting_since_s = now_s if candidates and chosen is None else None
        return chosen

    def _reap(self, tasks: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
        """Return the tasks still running; raise the error of a failed task. Delivery callbacks run here, too."""
        self._outlet.poll()
        if self._steering is not None:
            self._steering.follow()
        if time.monotonic() - self._reported > _REPORT_EVERY_S:
            self._reported = time.monotonic()
            self._log("worker_progress")
        running = {task for task in tasks if not task.done()}
        self._in_flight = len(running)
        for task in tasks - running:
            task.result()
        return running

    async def _pause(self, tasks: set[asyncio.Task[None]]) -> None:
        beat("playing")
        if tasks:
            await asyncio.wait(tasks, timeout=_TICK_S, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(_TICK_S)

    async def _knows_a_version(self, stop: asyncio.Event) -> bool:
        """Wait until a server reports its policy version; return False if `stop` is set first."""
        try:
            await finish_or_stop(self._first_version(), stop, grace_s=0.0)
        except TimeoutError:
            return False
        return not stop.is_set()

    async def _first_version(self) -> None:
        deadline = time.monotonic() + self._config.request_timeout_s
        while self._config.assume_version < 0 and await self._client.version() < 0:
            if time.monotonic() > deadline:
                raise InferenceUnavailable(
                    f"{', '.join(self._config.inference_urls)} named no policy version within "
                    f"{self._config.request_timeout_s:g} s; check that the learner publishes weights, or "
                    "set worker.assume_version"
                )
            beat("playing")
            await asyncio.sleep(0.1)

    async def _group(self, number: int, environment: LoadedEnvironment, prompt: Prompt) -> None:
        """Play the group with this number, from its prompt to its records."""
        config = self._config
        agents = self._gateway if environment.agent is not None else None
        stamp = GroupStamp(
            environment=environment.name,
            group_id=self._group_id(number),
            group_size=environment.group_size,
            policy_version=max(self._newest_version(agents), config.assume_version),
            temperature=environment.temperature,
            filters=Filters(config.top_p, config.top_k, config.min_p),
            logprobs_mode=config.logprobs_mode,
            worker_id=config.worker_id,
            origin=self._origin,
        )
        consumed = self._flow.consumed if self._flow is not None else 0
        unsent = list(uids_of(stamp.group_id, stamp.group_size))
        sent: list[Rollout] = []
        try:
            try:
                episodes = await self._episodes(environment, prompt, stamp)
            except _PASSING as failure:
                self._judge(environment, [], [failure])
                raise
            if self._flow is not None:
                self._flow.note_end(consumed)
            failures: list[BaseException] = []
            for uid, episode in zip(tuple(unsent), episodes, strict=True):
                error = episode.error
                if episode.written is not None:
                    self._note_written(environment, episode.rollouts, episode.written)
                elif error is None:
                    error = await self._send(episode.rollouts[0])
                if error is None:
                    unsent.remove(uid)
                    sent += episode.rollouts
                else:
                    failures.append(error)
            self._judge(environment, sent, failures)
            if failures:
                raise next((f for f in failures if not self._passes(f)), failures[0])
        except Exception as error:
            if not self._passes(error):
                await self._give_up(environment, prompt, stamp, unsent, repr(error))
                raise
            event(logger, "group_failed", level=logging.WARNING, group_id=stamp.group_id, error=str(error))
            self._failed += len(unsent)
            await self._cancel(environment, prompt, stamp, unsent, str(error), timeout_s=self._outlet.send_timeout_s)
        except BaseException:
            await self._give_up(environment, prompt, stamp, unsent, "the worker is stopping")
            raise

    def _group_id(self, number: int) -> str:
        """Id of a group of this worker; without the secret, nobody can predict it before the group is on the log."""
        name = f"{self._name}.{number}"
        if not self._group_secret:
            return name
        return f"{name}.{hashlib.blake2b(name.encode(), key=self._group_secret, digest_size=8).hexdigest()}"

    def _passes(self, error: BaseException) -> bool:
        """Whether an error only cancels members. Before the first rollout is sent, InferenceRefused ends the worker,
        unless it is ContextTooLong."""
        return isinstance(error, _PASSING) or (isinstance(error, InferenceRefused) and self._sent > 0)

    async def _give_up(
        self, environment: LoadedEnvironment, prompt: Prompt, stamp: GroupStamp, uids: Sequence[str], reason: str
    ) -> None:
        # Best effort: the error being raised matters more.
        with contextlib.suppress(RollstreamError):
            await self._cancel(environment, prompt, stamp, uids, reason, timeout_s=_GIVE_UP_S)

    def _newest_version(self, agents: LocalGateway | None) -> int:
        return max(self._client.newest_version, agents.newest_version if agents else -1)

    async def _episodes(
        self, environment: LoadedEnvironment, prompt: Prompt, stamp: GroupStamp
    ) -> Sequence[PlayedEpisode]:
        config = self._config
        limits = EpisodeLimits(timeout_s=config.episode_timeout_s, attempts=config.episode_attempts)
        if environment.agent is not None:
            assert self._gateway, "an environment that calls the policy itself needs a gateway"
            return await play_agents(
                environment.agent, self._gateway, prompt, stamp, limits, labeled=environment.awaits_label
            )
        sampling = GroupSampling(
            group_size=stamp.group_size,
            temperature=stamp.temperature,
            seed=row_seed(config.seed, stamp.group_id) >> 1,
            assume_version=config.assume_version,
            filters=stamp.filters,
            routed_experts=config.routed_experts,
        )
        episodes = await play_group(environment, self._client, prompt, sampling, limits)
        uids = uids_of(stamp.group_id, stamp.group_size)
        return [_played(episode, prompt, stamp, uid) for uid, episode in zip(uids, episodes, strict=True)]

    async def _send(self, rollout: Rollout) -> RecordError | None:
        """Send a rollout; return the error if it cannot be recorded."""
        try:
            await _with_room(lambda: self._outlet.send(rollout, timeout_s=0.0), self._outlet.send_timeout_s)
        except RecordError as error:
            return error
        self._count(rollout)
        return None

    def _note_written(
        self, environment: LoadedEnvironment, rollouts: Sequence[Rollout], written: WrittenRollouts
    ) -> None:
        """Count the rollouts of an agent's episode, which are on the log."""
        for rollout in rollouts:
            self._count(rollout)
        if self._flow is None:
            return
        # Room was reserved for only one rollout of each member.
        self._flow.release(1 - written.rollouts, environment.name)
        note = self._flow.note_unlabeled if environment.awaits_label else self._flow.note_delivery
        for _rollout in range(written.rollouts):
            note(written.partition, written.end - 1, environment.name)

    def _judge(
        self, environment: LoadedEnvironment, sent: Sequence[Rollout], failures: Sequence[BaseException]
    ) -> None:
        """Note the success of a group; pause an environment that keeps failing, so that others are played instead."""
        name = environment.name
        if any(isinstance(failure, InferenceUnavailable) for failure in failures):
            return
        if sent:
            # The success of a group that waits for labels is not known here.
            if not environment.awaits_label:
                success = sum(each.success for each in sent) / len(sent)
                self._mixture.note_group(name, sent[0].example_id, success)
            del self._failed_groups[name]
            return
        self._failed_groups[name] += 1
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (self._failed_groups[name] - 1))
        self._paused_until_s[name] = time.monotonic() + pause_s
        event(
            logger,
            "environment_paused",
            level=logging.WARNING,
            environment=name,
            groups_failed=self._failed_groups[name],
            seconds=pause_s,
        )

    def _count(self, rollout: Rollout) -> None:
        self._sent += 1
        self._tokens += int(rollout.loss_mask.sum())
        if not self._outlet.awaits_label(rollout.environment):
            self._scored += 1
            self._reward += rollout.reward
            self._components.add(rollout.reward_components)

    async def _cancel(
        self,
        environment: LoadedEnvironment,
        prompt: Prompt,
        stamp: GroupStamp,
        uids: Sequence[str],
        reason: str,
        *,
        timeout_s: float,
    ) -> None:
        """Count members as cancelled, and cancel them on the log; the gateway has already cancelled those of agents."""
        if not uids:
            return
        if self._flow is not None:
            self._flow.release(len(uids), stamp.environment)
        self._cancelled += len(uids)
        if environment.agent is not None:
            return
        cancelled = GroupCancelled(
            environment=stamp.environment,
            example_id=prompt.example_id,
            policy_version=stamp.policy_version,
            group_size=stamp.group_size,
            uids=tuple(uids),
            group_id=stamp.group_id,
            # An environment's error may be longer than a record.
            reason=clip(reason, _REASON_LIMIT),
            metadata=RolloutMetadata(worker_id=stamp.worker_id, timestamp=time.time()),
        )
        await _with_room(lambda: self._outlet.cancel(cancelled, timeout_s=0.0), timeout_s)

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
            # A worker that produces nothing may be waiting until these numbers fall.
            fields |= {"outstanding": self._flow.outstanding, "mine_unseen": self._flow.mine_unseen}
            fields["records_skipped"] = self._flow.records_skipped
        event(logger, name, totals=fields)


async def _with_room(send: Callable[[], None], timeout_s: float) -> None:
    """Call `send` until the producer's queue has room. Raises DeadlineExceeded if it stays full for `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            send()
            return
        except DeadlineExceeded:
            # The queue is full: let other groups continue while the broker catches up.
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(_TICK_S)


def _played(episode: Episode | BaseException, prompt: Prompt, stamp: GroupStamp, uid: str) -> PlayedEpisode:
    """Return a text episode with its rollout, or with the error that prevents the rollout."""
    if not isinstance(episode, Episode):
        return PlayedEpisode(error=episode)
    try:
        return PlayedEpisode(rollouts=(rollout_of(episode, prompt, stamp, uid=uid),))
    except RecordError as error:
        return PlayedEpisode(error=error)
