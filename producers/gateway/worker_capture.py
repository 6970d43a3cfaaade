"""An endpoint inside a worker that captures the model calls of environments' episodes token by token.

As in a gateway, calls are on `calls` before they are answered. The worker writes the rollouts, and then records that
they are written. An evaluator has the same endpoint without a log, so its calls appear only in its rollouts.
"""

import asyncio
import itertools
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal, Self

from aiohttp import web

from rollstream.producers.config import WorkerConfig
from rollstream.producers.environment import Endpoint, Score
from rollstream.producers.episodes.branches import Branch, branches_of
from rollstream.producers.gateway.call_log import AppendedRecord, CallWriter
from rollstream.producers.gateway.call_routes import CallRoutes, Listener
from rollstream.producers.gateway.capture import CallCapture, CaptureRules
from rollstream.producers.gateway.config import GatewayConfig
from rollstream.producers.gateway.episode_rollouts import RolloutForm, rollouts_of
from rollstream.producers.gateway.errors import NoSuchSession
from rollstream.producers.gateway.left_episodes import longest_silence_s
from rollstream.producers.gateway.session_names import session_key, session_name, session_of_key
from rollstream.producers.gateway.sessions import CapturedSession
from rollstream.producers.gateway.upstream import Upstream
from rollstream.producers.group_player import EpisodeFailed
from rollstream.producers.inference.errors import ContextTooLong, InferenceRefused, InferenceUnavailable
from rollstream.producers.policy_versions import PolicySource
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import RecordError, RollstreamError
from rollstream.topics.records import ModelCall, Rollout, SessionEvent

_SECRET = "worker"
_MOST_BODY = 64 * 1024 * 1024
"""Largest request in bytes; generous, because agents inside the worker are trusted with its memory."""


@dataclass(frozen=True, kw_only=True)
class EpisodeStamp:
    """Data that a worker stamps on an episode when it begins."""

    environment: str
    example_id: str
    group_id: str
    group_size: int
    member: int
    policy_version: int


class _Unrecorded:
    """Accepts records as a CallWriter does, but stores none."""

    def __init__(self) -> None:
        self._places = itertools.count()

    async def append(self, record: ModelCall | SessionEvent) -> AppendedRecord:
        return AppendedRecord(0, next(self._places), int(time.time() * 1000))

    async def close(self) -> None:
        return


class _OwnLog:
    """The log of a worker's sessions, to which no other process writes."""

    def __init__(self, writer: CallWriter | _Unrecorded) -> None:
        self._writer = writer

    async def append(self, record: ModelCall | SessionEvent) -> AppendedRecord:
        return await self._writer.append(record)

    async def current(self, session: CapturedSession) -> None:
        return

    async def applied(self, session: CapturedSession, record: ModelCall, place: AppendedRecord) -> None:
        session.add_call(record, place.append_ms)


class WorkerCapture:
    """The endpoint of one worker; use it as an async context manager."""

    def __init__(
        self,
        kafka: KafkaConfig,
        run: str,
        worker: WorkerConfig,
        *,
        author: str,
        policies: PolicySource,
        temperature: float | None = None,
        sampling: Literal["run", "agent"] = "run",
        recorded: bool = True,
        max_calls: int = GatewayConfig.max_calls,
    ) -> None:
        """`author` names the worker and its incarnation in records. `policies` maps labels of weights to versions.
        `temperature` defaults to the worker's; `sampling` and `max_calls` mean the same as in the section gateway.
        Without `recorded`, nothing is written to `calls`."""
        self.policies = policies
        """Policy versions of the run, and their learner steps."""
        self._kafka, self._run, self._worker = kafka, run, worker
        self._author, self._sampling, self._recorded = author, sampling, recorded
        self._temperature = worker.temperature if temperature is None else temperature
        self._max_calls = max_calls
        self._sessions: dict[str, CapturedSession] = {}
        self._failures: dict[str, RollstreamError] = {}
        """Errors of the calls that failed sessions."""
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Listen on a free port of this machine. Raises TopicError, BrokerUnavailable, ConfigurationError."""
        worker = self._worker
        try:
            self._writer = CallWriter(self._kafka, self._run) if self._recorded else _Unrecorded()
            self._stack.push_async_callback(self._writer.close)
            upstream = Upstream(
                worker.inference_urls,
                model=worker.model,
                api_key=worker.api_key,
                timeout_s=worker.request_timeout_s,
                policies=self.policies,
                max_version_skew=worker.max_version_skew,
            )
            await self._stack.enter_async_context(upstream)
            await upstream.version()
            self._upstream = upstream
            rules = CaptureRules(
                temperature=self._temperature,
                sampling=self._sampling,
                max_calls=self._max_calls,
                author=self._author,
                seed=worker.seed,
            )
            self._capture = CallCapture(upstream, _OwnLog(self._writer), rules)
            listener = Listener("capture", _MOST_BODY)
            self._stack.push_async_callback(listener.close)
            calls = CallRoutes(self._capture, self._session_of, self._fail)
            self._url = await listener.listen(calls.routes("/sessions/{session}/v1"), "127.0.0.1", 0)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Stop listening; open sessions stay open on the log."""
        await self._stack.aclose()

    @property
    def newest_version(self) -> int:
        """Newest policy version in any answer; -1 before the first."""
        return self._upstream.newest_version

    def use(self, urls: Sequence[str]) -> None:
        """Send calls to these servers, at least one, from now on."""
        self._upstream.use(urls)

    def failure_of(self, session: CapturedSession) -> RollstreamError | None:
        """Return the error of the call that failed a session; None if none did."""
        if not session.failure:
            return None
        # Without an error of a call, the session's own records are at fault.
        return self._failures.get(session.name) or RecordError(session.failure)

    async def open(self, stamp: EpisodeStamp, attempt: int = 1) -> "EpisodeCapture":
        """Start the session of an attempt at an episode. Raises RecordError for an invalid group id, DeliveryError."""
        # A gateway ends the session after this time if no worker does.
        silence_ms = int(longest_silence_s(self._worker) * 1000)
        start = SessionEvent(
            session=session_name(stamp.group_id, stamp.member, attempt),
            kind="start",
            author=self._author,
            wall_time=time.time(),
            owner="worker",
            environment=stamp.environment,
            example_id=stamp.example_id,
            group_id=stamp.group_id,
            group_size=stamp.group_size,
            member=stamp.member,
            policy_version=stamp.policy_version,
            idle_timeout_ms=silence_ms,
            reward_timeout_ms=silence_ms,
        )
        place = await self._writer.append(start)
        session = CapturedSession(start, place.offset, stamp.policy_version, place.append_ms)
        self._sessions[session.name] = session
        endpoint = Endpoint(
            base_url=f"{self._url}/sessions/{session.name}/v1",
            api_key=session_key(session.name, _SECRET),
            model=self._worker.model,
        )
        form = RolloutForm(
            logprobs_mode=self._worker.logprobs_mode,
            temperature=self._temperature,
            assume_version=self._worker.assume_version,
        )
        return EpisodeCapture(self, session, endpoint, form)

    async def change(self, session: CapturedSession, kind: Any, **fields: Any) -> None:
        """Record a change of a session."""
        change = SessionEvent(
            session=session.name, kind=kind, author=self._author, wall_time=time.time(), owner="worker", **fields
        )
        place = await self._writer.append(change)
        session.add_event(change, place.append_ms)
        if kind == "finished":
            self.forget(session)

    def forget(self, session: CapturedSession) -> None:
        """Take no more calls of a session, and free its memory. On the log it stays as it is."""
        self._sessions.pop(session.name, None)
        self._failures.pop(session.name, None)
        self._capture.forget(session.name)

    async def _session_of(self, http: web.Request) -> CapturedSession:
        name = http.match_info["session"]
        bearer = http.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if name not in self._sessions or session_of_key(bearer, _SECRET) != name:
            raise NoSuchSession(f"no episode {name[:64]!r} is being played with this key; it may have ended")
        return self._sessions[name]

    async def _fail(self, session: CapturedSession, error: RollstreamError) -> None:
        if session.name not in self._sessions:
            return  # Its attempt has ended, and the agent no longer waits for the call.
        if isinstance(error, ContextTooLong):
            await self.change(session, "truncated")
        else:
            reason = f"a model call failed: {error}"[:4096]
            kinds = (InferenceUnavailable, InferenceRefused)
            # The remaining error is SessionClosed: the agent made more calls than a session may have.
            kind = next((kind for kind in kinds if isinstance(error, kind)), EpisodeFailed)
            self._failures.setdefault(session.name, kind(reason))
            await self.change(session, "failed", reason=reason)


class EpisodeCapture:
    """The session of one episode."""

    def __init__(self, capture: WorkerCapture, session: CapturedSession, endpoint: Endpoint, form: RolloutForm) -> None:
        self._capture, self._session, self._form = capture, session, form
        self.endpoint = endpoint
        """Address for the environment."""

    @property
    def failure(self) -> RollstreamError | None:
        """Error of the model call that failed the episode; None if none did."""
        return self._capture.failure_of(self._session)

    @property
    def branches(self) -> list[Branch]:
        """Branches of the calls so far. Raises RecordError if a prompt cannot be rebuilt."""
        return branches_of(self._session.calls)

    async def finish(self, score: Score) -> list[Rollout]:
        """End the session, and return its rollouts: one for each branch, with uids that begin with GROUP.MEMBER.

        Raises InferenceUnavailable, InferenceRefused or EpisodeFailed if a call failed, RecordError if no call was made
        or the calls cannot be trained on.
        """
        if self.failure is not None:
            raise self.failure
        calls = list(self._session.calls)
        if not calls:
            raise RecordError("no model call was made")
        await self._capture.change(self._session, "end")
        components = {name: float(value) for name, value in score.components.items()}
        scored = replace(self._session, reward=float(score.reward), components=components, calls=calls)
        policies = await asyncio.to_thread(self._capture.policies.read, 0.0)
        return await asyncio.to_thread(rollouts_of, scored, self._form, policies)

    async def written(self, rollouts: Sequence[Rollout]) -> None:
        """Record that the rollouts are on the log."""
        await self._capture.change(self._session, "finished", uids=tuple(rollout.uid for rollout in rollouts))

    async def cancelled(self, reason: str) -> None:
        """Record that the calls yield no rollouts, because the episode is cancelled on the log or tried again."""
        await self._capture.change(self._session, "finished", reason=reason[:4096] or "cancelled")

    def forget(self) -> None:
        """Take no more calls, and leave the session open on the log."""
        self._capture.forget(self._session)
