"""A gateway inside a worker or an evaluator, for the agents that it plays, with an address on this machine only.

A worker's sessions are on `calls`, and any worker or gateway ends those of a killed worker. An evaluator keeps its
sessions in memory, so its calls appear only in its rollouts.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from types import TracebackType
from typing import Self

from aiohttp import web

from rollstream.producers.config import WorkerConfig
from rollstream.producers.environments.environment import Endpoint, Score
from rollstream.producers.flow.policy_versions import PolicySource
from rollstream.producers.gateway.call_forms import AgentRequest
from rollstream.producers.gateway.call_routes import CallRoutes, Listener, key_of
from rollstream.producers.gateway.capture import CaptureRules
from rollstream.producers.gateway.config import GatewayConfig
from rollstream.producers.gateway.errors import NoSuchSession, SessionClosed
from rollstream.producers.gateway.gateway_parts import GatewayParts, gateway_parts
from rollstream.producers.gateway.service import EpisodeStamp, WrittenRollouts
from rollstream.producers.gateway.sessions import CapturedSession, session_key, session_of_key
from rollstream.producers.inference.errors import ContextTooLong, InferenceRefused, InferenceUnavailable
from rollstream.producers.worker.group_player import EpisodeFailed
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import RecordError, RollstreamError
from rollstream.topics.records import Rollout, SessionEvent

ABANDONED = "the worker that played the episode is gone"
"""Why an episode of a worker's earlier process is cancelled."""
_SECRET = "worker"
_MOST_BODY = 64 * 1024 * 1024
"""Largest request in bytes; generous, because agents inside the worker are trusted with its memory."""
_SLACK_S = 60.0
"""Time beyond worker.episode_timeout_s after which the worker that plays an episode must be gone."""
_REMEMBERED = 100
_AGAIN_S = 0.1


class LocalGateway:
    """The gateway of one process; use it as an async context manager."""

    def __init__(
        self,
        kafka: KafkaConfig,
        run: str,
        worker: WorkerConfig,
        config: GatewayConfig,
        *,
        name: str,
        policies: PolicySource,
        temperatures: Mapping[str, float],
        recorded: bool = True,
    ) -> None:
        """`name` is the process's name in records, the same after a restart. `temperatures` are those of environments;
        without one, worker.temperature counts. Without `recorded`, nothing is written to any topic."""
        self._worker, self._recorded = worker, recorded
        config = replace(
            config,
            replica_id=name,
            idle_timeout_s=worker.episode_timeout_s + _SLACK_S,
            remembered_sessions=_REMEMBERED,
        )
        rules = CaptureRules(
            temperature=worker.temperature,
            temperatures=temperatures,
            sampling="run",
            max_calls=config.max_calls,
            author=name,
            seed=worker.seed,
        )
        self._opened = gateway_parts(
            kafka,
            run,
            config,
            worker,
            policies,
            rules,
            recorded=recorded,
            shared=False,
            on_written=self._note_written,
        )
        self._playing: dict[str, CapturedSession] = {}
        self._mistakes: list[Exception] = []
        self._failures: dict[str, RollstreamError] = {}
        """Errors of the calls that failed sessions."""
        self._written: dict[str, Sequence[Rollout]] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """End the episodes that an earlier process with this name left open, and listen on a free port of this machine.
        Raises TopicError, BrokerUnavailable, ConfigurationError, DeliveryError."""
        try:
            self._parts: GatewayParts = await self._stack.enter_async_context(self._opened)
            await self._parts.upstream.version()
            if self._recorded:
                await self._parts.service.end_abandoned(ABANDONED)
                self._stack.push_async_callback(self._stop_attending)
                self._stop = asyncio.Event()
                self._attending = asyncio.ensure_future(self._parts.service.attend(self._stop))
            listener = Listener("capture", _MOST_BODY, on_mistake=self._mistakes.append)
            self._stack.push_async_callback(listener.close)
            calls = CallRoutes(self._parts.capture, self._session_of, self._fail)
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

    async def _stop_attending(self) -> None:
        self._stop.set()
        await self._attending

    @property
    def newest_version(self) -> int:
        """Newest policy version in any answer; -1 before the first."""
        return self._parts.upstream.newest_version

    def use(self, urls: Sequence[str]) -> None:
        """Send calls to these servers, at least one, from now on."""
        self._parts.upstream.use(urls)

    async def open(self, stamp: EpisodeStamp, attempt: int = 1) -> CapturedSession:
        """Start the session of an attempt at an episode. Raises RecordError for an invalid group id, DeliveryError."""
        session = await self._parts.service.open(stamp, attempt)
        self._playing[session.name] = session
        return session

    def check(self) -> None:
        """Raise the first error of our own code that failed a call. Agents see it as an answer of the server, and would
        fail every episode with it."""
        if self._mistakes:
            raise self._mistakes[0]

    def endpoint_of(self, session: CapturedSession) -> Endpoint:
        """Return the address of a session for its environment."""
        return Endpoint(
            base_url=f"{self._url}/sessions/{session.name}/v1",
            api_key=session_key(session.name, _SECRET),
            model=self._worker.model,
        )

    def failure_of(self, session: CapturedSession) -> RollstreamError | None:
        """Return the error of the call that failed a session; None if none did."""
        if not session.failure:
            return None
        # Without an error of a call, the session's own records are at fault.
        return self._failures.get(session.name) or RecordError(session.failure)

    async def finish(self, session: CapturedSession, score: Score) -> Sequence[Rollout]:
        """End a session with its score; return its rollouts once they are on the log, one for each branch, with uids
        that begin with GROUP.MEMBER. Another process that took the session over may have written them; they are then
        not returned.

        Raises InferenceUnavailable, InferenceRefused or EpisodeFailed if a call failed, RecordError if no call was made
        or the calls cannot be trained on; the episode is then cancelled on the log.
        """
        components = {name: float(value) for name, value in score.components.items()}
        with suppress(SessionClosed, RecordError):  # the reason of the cancellation
            await self._parts.service.reward(session, float(score.reward), components=components, turn_rewards={})
        finished = await self.end(session)
        failure, rollouts = self.failure_of(session), self._written.get(session.name, ())
        self._forget(session)
        if not finished.uids:
            raise failure or RecordError(finished.reason)
        return rollouts

    async def cancel(self, session: CapturedSession, reason: str) -> None:
        """Cancel the episode of a session; return once this is on the log."""
        await self._parts.service.fail(session, reason)
        await self.end(session)
        self._forget(session)

    async def try_again(self, session: CapturedSession, reason: str) -> None:
        """Finish a failed attempt at an episode that has a further attempt."""
        await self._parts.service.try_again(session, reason)
        self._forget(session)

    def written(self, session: CapturedSession) -> WrittenRollouts:
        """Return where the rollouts of a finished session are."""
        return self._parts.service.written(session)

    async def end(self, session: CapturedSession) -> SessionEvent:
        """End a session, and wait until its rollouts, or its cancellation, are on the log."""
        while not await self._parts.service.end(session):
            await asyncio.sleep(_AGAIN_S)
        assert session.finished is not None
        return session.finished

    def _note_written(self, session: CapturedSession, rollouts: Sequence[Rollout]) -> None:
        if session.name in self._playing:
            self._written[session.name] = rollouts

    def _forget(self, session: CapturedSession) -> None:
        for names in (self._playing, self._failures, self._written):
            names.pop(session.name, None)

    async def _session_of(self, http: web.Request) -> CapturedSession:
        name = http.match_info["session"]
        if name not in self._playing or session_of_key(key_of(http), _SECRET) != name:
            raise NoSuchSession(f"no episode {name[:64]!r} is being played with this key; it may have ended")
        return self._playing[name]

    async def _fail(self, session: CapturedSession, error: RollstreamError, request: AgentRequest) -> None:
        if session.name not in self._playing:
            return  # Its attempt has ended, and the agent no longer waits for the call.
        if not isinstance(error, ContextTooLong):
            # The remaining error is SessionClosed: the agent made more calls than a session may have.
            kinds = (kind for kind in (InferenceUnavailable, InferenceRefused) if isinstance(error, kind))
            failure = next(kinds, EpisodeFailed)(f"a model call failed: {error}"[:4096])
            self._failures.setdefault(session.name, failure)
        await self._parts.service.fail_call(session, error, request)
