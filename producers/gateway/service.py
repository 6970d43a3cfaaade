"""The service behind a gateway's sessions: starts sessions within the capacity rule, records their rewards and when
they end, and writes their rollouts.

All lasting state is on `calls`, so any gateway of a run serves any session, and a restarted gateway continues them all.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from rollstream.producers.config import CapacityConfig
from rollstream.producers.flow.flow_control import RunProgress, check_capacity, largest_group, may_start
from rollstream.producers.gateway.call_forms import AgentRequest, continued_call
from rollstream.producers.gateway.capture import SessionLog
from rollstream.producers.gateway.config import GatewayConfig
from rollstream.producers.gateway.errors import NoCapacity, NoSuchSession, NoVersion, SessionClosed
from rollstream.producers.gateway.sessions import (
    CapturedSession,
    PartitionSessions,
    group_of,
    reward_problem,
    session_name,
)
from rollstream.producers.gateway.upstream import Upstream
from rollstream.producers.inference.errors import ContextTooLong
from rollstream.topics.errors import RecordError, RollstreamError
from rollstream.topics.heartbeats import beat
from rollstream.topics.logs import event
from rollstream.topics.records import SessionEvent
from rollstream.topics.wire.validation import NAME_LIMIT

logger = logging.getLogger(__name__)
_JANITOR_S = 0.5
_MARK_AGAIN_S = 1.0
_FAULTY_AGAIN_S = 10.0
"""Time until a session whose own records are at fault, or that met an unexpected error, is attended to again."""


class WrittenRollouts(NamedTuple):
    """The rollouts of a finished session."""

    partition: int
    end: int
    """Offset after the last of them."""
    rollouts: int


@dataclass(frozen=True, kw_only=True)
class SessionRequest:
    """A request for the sessions of a group."""

    task_id: str
    environment: str
    group_id: str = ""
    group_size: int = 1
    member: int | None = None
    """Member to start; None starts all."""


@dataclass(frozen=True, kw_only=True)
class EpisodeStamp:
    """Data that is stamped on an episode when it begins."""

    environment: str
    example_id: str
    group_id: str
    group_size: int
    member: int
    policy_version: int
    labeled: bool = False
    """Whether a labeler gives the reward that the episode is trained on."""


class EpisodeWriter(Protocol):
    """Writes the rollouts of closed sessions."""

    def partition_of(self, session: CapturedSession) -> int:
        """Return the partition of the rollouts of a session."""

    async def finish(self, session: CapturedSession) -> bool:
        """Write the rollouts of a closed session, or its cancellation; return whether they are written."""


class SessionService:
    """Starts, scores and ends sessions."""

    def __init__(
        self,
        log: SessionLog,
        writer: EpisodeWriter,
        upstream: Upstream,
        config: GatewayConfig,
        *,
        assume_version: int,
        capacity: CapacityConfig | None = None,
        read_progress: Callable[[], RunProgress] = RunProgress,
        draining: Callable[[], bool] = lambda: False,
    ) -> None:
        """Without `capacity` only gateway.max_sessions limits sessions; while `draining` is true, none can start."""
        self._log, self._writer, self._upstream = log, writer, upstream
        self._config = config
        self._assume_version = assume_version
        self._capacity, self._read_progress, self._draining = capacity, read_progress, draining
        self._starting: dict[str, int] = {}
        """By name, the group sizes of sessions admitted whose starts may not be applied yet."""
        self._progress = read_progress()
        self._unread: dict[str, WrittenRollouts] = {}
        """By session, the rollouts that any gateway has written and that grouping has not read."""
        self._marked: dict[str, float] = {}
        self._seen: dict[str, float] = {}
        self._faulty: dict[str, float] = {}
        """By session that could not be attended to, the time of the next attempt."""

    # ------------------------------------------------------------------ sessions

    def read(self, session: CapturedSession) -> None:
        """Note that a record of a session was read."""
        if session.finished is None:
            self._seen[session.name] = time.monotonic()
        else:
            for noted in (self._seen, self._marked, self._faulty):
                noted.pop(session.name, None)
            # Workers count their own rollouts, and without a limit none need to be counted.
            if self._capacity is not None and session.start.owner == "gateway" and session.finished.uids:
                written = self.written(session)
                if self._progress.position(written.partition) < written.end:
                    self._unread[session.name] = written

    def written(self, session: CapturedSession) -> WrittenRollouts:
        """Return where the rollouts of a finished session are."""
        assert session.finished is not None
        finished = session.finished
        return WrittenRollouts(self._writer.partition_of(session), finished.rollouts_end, len(finished.uids))

    def _observe(self) -> RunProgress:
        """Read the run's progress, and forget the rollouts that grouping has read by then."""
        progress = self._progress = self._read_progress()
        read = [name for name, written in self._unread.items() if progress.position(written.partition) >= written.end]
        for name in read:
            del self._unread[name]
        return progress

    @property
    def open_sessions(self) -> int:
        """Number of sessions whose rollouts are not written, with those of agents in workers."""
        return sum(len(fold.open) for fold in self._log.folds)

    def share_with(self, workers: int) -> None:
        """Share the capacity among this number of workers from now on; the gateways of a run are one of them. Raises
        ConfigurationError and changes nothing if the pipeline could then stall for ever."""
        if self._capacity is not None and self._capacity.workers != workers:
            capacity = replace(self._capacity, workers=workers)
            check_capacity(capacity)
            self._capacity = capacity

    @property
    def newest_version(self) -> int:
        """Newest policy version in any answer; -1 before the first."""
        return self._upstream.newest_version

    @property
    def records_skipped(self) -> int:
        """Number of records of `calls` that could not be read."""
        return self._log.records_skipped

    async def session(self, name: str) -> CapturedSession:
        """Return a session. Raises NoSuchSession."""
        try:
            partition = self._log.partition_of(name)
            if name not in self._log.folds[partition].sessions:
                # Another gateway may have started it just now.
                await self._log.current(partition)
        except RecordError as error:
            raise NoSuchSession(str(error)) from error
        session = self._log.folds[partition].sessions.get(name)
        if session is None:
            raise NoSuchSession(f"no session is named {name[:64]!r}; POST /rl/start_session starts one")
        return session

    async def start(self, request: SessionRequest) -> list[CapturedSession]:
        """Start the sessions of a group, or one of them; existing sessions are returned unchanged.

        Raises NoCapacity, NoVersion, or RecordError for a request that could not lead to a rollout.
        """
        group = request.group_id or uuid.uuid4().hex
        self._check(request)
        members = range(request.group_size) if request.member is None else [request.member]
        names = [session_name(group, member) for member in members]
        partition = self._log.partition_of(names[0])
        fold = await self._log.current(partition)
        new = [(name, member) for name, member in zip(names, members, strict=True) if name not in fold.sessions]
        if new:
            with self._admitted({name for name, _member in new}, group, request, fold):
                version = await self._newest_known_version()
                stamps = [
                    EpisodeStamp(
                        environment=request.environment,
                        example_id=request.task_id,
                        group_id=group,
                        group_size=request.group_size,
                        member=member,
                        policy_version=version,
                    )
                    for _name, member in new
                ]
                await asyncio.gather(*(self._append(self._start_event(stamp)) for stamp in stamps))
        return [fold.sessions[name] for name in names]

    async def open(self, stamp: EpisodeStamp, attempt: int = 1) -> CapturedSession:
        """Start the session of an attempt at an episode that a worker plays, in the worker's own capacity. Raises
        RecordError for an invalid group id, DeliveryError."""
        start = replace(self._start_event(stamp, attempt), owner="worker")
        await self._append(start)
        return self._log.folds[self._log.partition_of(start.session)].sessions[start.session]

    async def _newest_known_version(self) -> int:
        version = max(self._upstream.newest_version, self._assume_version)
        if version < 0:
            version = max(await self._upstream.version(), self._assume_version)
        if version < 0:
            raise NoVersion(
                "no inference server names a policy version yet; try again, or set worker.assume_version for a "
                "model that never changes"
            )
        return version

    def _check(self, request: SessionRequest) -> None:
        for name, value in (("task_id", request.task_id), ("environment", request.environment)):
            if not 0 < len(value) <= NAME_LIMIT:
                raise RecordError(f"{name} has {len(value)} characters; it must have 1 to {NAME_LIMIT}")
        if not 1 <= request.group_size <= self._config.max_group_size:
            raise RecordError(f"group_size is {request.group_size}; it must be 1 to {self._config.max_group_size}")
        if request.member is not None and not 0 <= request.member < request.group_size:
            raise RecordError(f"member is {request.member}; it must be at least 0 and below {request.group_size}")
        if request.member is not None and not request.group_id:
            raise RecordError("member is given without group_id; name the group that it belongs to")

    @contextmanager
    def _admitted(
        self, names: Set[str], group: str, request: SessionRequest, fold: PartitionSessions
    ) -> Iterator[None]:
        """Admit new sessions, and count them as open while the caller starts them. Sessions that another request is
        starting are admitted already. Raises NoCapacity, and RecordError for a group that can never start."""
        added = names - self._starting.keys()
        if added:
            begun = fold.names_in(group) or any(group_of(name) == group for name in self._starting)
            self._admit(len(added), 0 if begun else request.group_size)
        self._starting |= dict.fromkeys(added, request.group_size)
        try:
            yield
        finally:
            for name in added:
                del self._starting[name]

    def _expected(self) -> int:
        """Return the number of members that have not begun, of groups with a session that is open or being started."""
        sizes, begun = dict[str, int](), dict[str, set[str]]()
        for name, size in self._starting.items():
            group = group_of(name)
            sizes[group] = size
            begun.setdefault(group, set()).add(name)
        for fold in self._log.folds:
            for group, size in {s.start.group_id: s.start.group_size for s in _of_gateways(fold)}.items():
                if size > self._config.max_group_size:
                    continue  # No gateway starts such a group, so its members would hold the capacity for ever.
                sizes[group] = size
                begun.setdefault(group, set()).update(fold.names_in(group))
        return sum(max(0, size - len(begun[group])) for group, size in sizes.items())

    @property
    def _unfinished(self) -> int:
        """Sessions of gateways that are open or being started. Workers' sessions are in the workers' share."""
        sessions = (session for fold in self._log.folds for session in _of_gateways(fold))
        return len(self._starting.keys() | {session.name for session in sessions})

    def _admit(self, sessions: int, rollouts: int) -> None:
        """Raise unless so many sessions may start. `rollouts` are those of the group that they begin, or 0.

        The first member of a group reserves room for all, or the learner could wait for groups that stay incomplete.
        """
        if self._draining():
            raise NoCapacity("the run is being drained, so no session can start; open sessions continue to their ends")
        is_open = self._unfinished
        if is_open + sessions > self._config.max_sessions:
            raise NoCapacity(f"{is_open} sessions are open, and at most {self._config.max_sessions} may be open")
        if self._capacity is None or not rollouts:
            return
        if rollouts > (largest := largest_group(self._capacity)):
            raise RecordError(
                f"a group of {rollouts} can never start: at most {largest} rollouts of the run's gateways may wait for "
                "the learner. Start smaller groups, raise learner.max_policy_lag or worker.concurrency, or run fewer "
                "workers"
            )
        progress = self._observe()
        unread = sum(written.rollouts for written in self._unread.values())
        expected = self._expected()
        if not may_start(self._capacity, progress.outstanding, is_open + expected + unread, rollouts):
            raise NoCapacity(
                f"{progress.outstanding} rollouts wait for the learner, {unread} of the gateways wait for grouping, "
                f"{is_open} sessions are open, and {expected} members of their groups have not begun; more would be "
                "stale before the learner reads them "
                f"(learner.max_policy_lag {self._capacity.max_policy_lag}), or exceed the gateways' share of {largest} "
                "(worker.concurrency)"
            )

    def _start_event(self, stamp: EpisodeStamp, attempt: int = 1) -> SessionEvent:
        return SessionEvent(
            session=session_name(stamp.group_id, stamp.member, attempt),
            kind="start",
            **vars(stamp),
            idle_timeout_ms=int(self._config.idle_timeout_s * 1000),
            reward_timeout_ms=int(self._config.reward_timeout_s * 1000),
        )

    # ------------------------------------------------------------------ rewards and ends

    async def reward(
        self,
        session: CapturedSession,
        reward: float | None,
        *,
        components: Mapping[str, float],
        turn_rewards: Mapping[str, float],
        request: str = "",
        problem: str = "",
    ) -> bool:
        """Give a session a reward; the last reward before it is closed counts. Return whether its rollouts are written.

        Raises SessionClosed if the session was closed with another reward or without a reward. Raises RecordError if
        the reward is invalid, or a `problem` says why it is no number; the episode is then cancelled, because no number
        can replace a missing judgement.
        """
        await self._current(session)
        if session.closed or session.finished:
            if self._has_reward(session, reward, components, turn_rewards):
                return await self._writer.finish(session)
            why = session.closed.reason if session.closed else ""
            raise SessionClosed(f"session {session.name} is closed{': ' if why else ''}{why}; its reward cannot change")
        problem = problem or reward_problem(reward, components, turn_rewards)
        if problem:
            await self.fail(session, problem)
            raise RecordError(f"{problem}; the episode of session {session.name} is cancelled")
        await self._append(
            SessionEvent(
                session=session.name,
                kind="reward",
                request=request,
                scored=reward is not None,
                reward=0.0 if reward is None else reward,
                components=dict(components),
                turn_rewards=dict(turn_rewards),
            )
        )
        return await self._writer.finish(session)

    def _has_reward(
        self,
        session: CapturedSession,
        reward: float | None,
        components: Mapping[str, float],
        turn_rewards: Mapping[str, float],
    ) -> bool:
        return (
            session.scored
            and (reward is None or reward == session.reward)
            and components.items() <= session.components.items()
            and turn_rewards.items() <= session.turn_rewards.items()
        )

    async def fail_call(self, session: CapturedSession, error: RollstreamError, request: AgentRequest) -> None:
        """Note a call that failed: if it was too long, mark the call that it continues, or else the newest, as cut off;
        otherwise cancel the episode."""
        if isinstance(error, ContextTooLong):
            continued = continued_call(request, session.sequences)
            calls = session.calls[-1:] if continued is None else [continued[0].call]
            await self._change(session, "truncated", reason=str(error), uids=tuple(call.uid for call in calls))
        else:
            await self.fail(session, f"a model call failed: {error}")

    async def fail(self, session: CapturedSession, reason: str) -> bool:
        """Cancel the episode of a session. Return whether the cancellation is written."""
        await self._current(session)
        if not session.closed and not session.finished:
            await self._change(session, "failed", reason=reason)
        return await self._writer.finish(session)

    async def end(self, session: CapturedSession) -> bool:
        """End a session: it accepts no more calls. Return whether its rollouts are written."""
        await self._current(session)
        if not session.ended and not session.closed and not session.finished:
            await self._change(session, "end")
        return await self._writer.finish(session)

    async def try_again(self, session: CapturedSession, reason: str) -> None:
        """Finish a failed attempt at an episode that has a further attempt: its calls yield nothing, and nothing is
        cancelled."""
        await self._change(session, "finished", reason=reason)

    async def _current(self, session: CapturedSession) -> None:
        await self._log.current(self._log.partition_of(session.name))

    async def _change(self, session: CapturedSession, kind: Any, reason: str = "", uids: tuple[str, ...] = ()) -> None:
        await self._append(SessionEvent(session=session.name, kind=kind, reason=reason[:4096], uids=uids))

    async def _append(self, change: SessionEvent) -> None:
        await self._log.append(replace(change, author=self._config.replica_id, wall_time=time.time()))

    # ------------------------------------------------------------------ timeouts and takeovers

    async def end_abandoned(self, reason: str) -> None:
        """End the open sessions that an earlier process with this name started and played itself."""
        author = self._config.replica_id
        sessions = [s for fold in self._log.folds for s in fold.open.values() if s.start.author == author]
        last_attempts = {session.episode: session for session in sessions}

        async def end(session: CapturedSession) -> None:
            if session is not last_attempts[session.episode]:
                await self.try_again(session, reason)
            elif session.scored:
                await self.end(session)
            else:
                await self.fail(session, reason)

        await asyncio.gather(*map(end, sessions))
        if sessions:
            event(logger, "abandoned_sessions_ended", sessions=len(sessions))

    async def attend(self, stop: asyncio.Event) -> None:
        """Until `stop` is set, mark sessions whose time is up, and write rollouts that other gateways left unwritten.

        The local clock only decides when to write a mark; the mark's append time decides whether it ends a session.
        """
        while not stop.is_set():
            beat("sessions")
            self._observe()
            for fold in self._log.folds:
                for session in [*fold.open.values()]:
                    if time.monotonic() < self._faulty.get(session.name, 0.0):
                        continue
                    try:
                        await self._attend_to(session)
                    except RollstreamError as error:  # No session may end a gateway, which serves the others, too.
                        self._leave(session, error)
            try:
                await asyncio.wait_for(stop.wait(), _JANITOR_S)
            except TimeoutError:
                continue

    def _leave(self, session: CapturedSession, error: RollstreamError) -> None:
        """Log why a session is left. An error of the brokers may pass soon, but an invalid record stays invalid."""
        if isinstance(error, RecordError):
            self._faulty[session.name] = time.monotonic() + _FAULTY_AGAIN_S
        event(logger, "session_left", level=logging.WARNING, session=session.name, error=str(error))

    async def _attend_to(self, session: CapturedSession) -> None:
        now = time.monotonic()
        quiet_s = now - self._seen.get(session.name, now)
        if session.closed is not None:
            # The gateway that closed the session writes its rollouts; after takeover_s, any other gateway may.
            if session.last_author == self._config.replica_id or quiet_s >= self._config.takeover_s:
                await self._writer.finish(session)
            return
        timeout_s = (session.deadline_ms - session.last_ms) / 1000
        overdue = time.time() * 1000 >= session.deadline_ms or quiet_s >= timeout_s
        if overdue and now - self._marked.get(session.name, -_MARK_AGAIN_S) >= _MARK_AGAIN_S:
            self._marked[session.name] = now
            await self._change(session, "mark")
            if session.closed is not None:
                event(logger, "session_given_up", session=session.name, reason=session.closed.reason)
                await self._writer.finish(session)


def _of_gateways(fold: PartitionSessions) -> Iterator[CapturedSession]:
    """Yield the open sessions of gateways; those of workers are in the workers' share."""
    return (session for session in fold.open.values() if session.start.owner == "gateway")
