"""Captures the model calls of sessions: each is on the log before its answer is complete, and a retry gets that answer.

It does not handle the agents' HTTP.
"""

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np

from rollstream.producers.gateway.call_forms import (
    ROUTES,
    AgentRequest,
    agent_answer,
    call_answers,
    previous_turn,
    recorded_sampling,
    server_request,
    with_prompt,
)
from rollstream.producers.gateway.errors import SessionClosed
from rollstream.producers.gateway.sessions import CapturedSession, PartitionSessions
from rollstream.producers.gateway.streamed_answers import DONE, StreamedAnswer, error_in, event_of, events_of
from rollstream.producers.gateway.upstream import Upstream, labelled
from rollstream.producers.inference.answers import samples_of
from rollstream.producers.inference.decoding import row_seed
from rollstream.producers.inference.errors import InferenceRefused, InferenceUnavailable
from rollstream.producers.json_text import decode, encode
from rollstream.topics.records import ModelCall, SessionEvent


@dataclass(frozen=True, kw_only=True)
class CaptureRules:
    """How calls are forwarded to the servers."""

    temperature: float
    sampling: Literal["run", "agent"]
    max_calls: int
    author: str
    temperatures: Mapping[str, float] = field(default_factory=dict)
    """By environment, the temperatures that differ from `temperature`."""
    seed: int | None = None
    """Seed for calls without one, so that each attempt at an episode uses the same seeds; if None, no seed is sent."""


class SessionLog(Protocol):
    """The log of sessions: `calls`, or a log in memory."""

    @property
    def folds(self) -> Sequence[PartitionSessions]:
        """Sessions of each partition."""

    @property
    def records_skipped(self) -> int:
        """Number of records that could not be read."""

    def partition_of(self, session: str) -> int:
        """Return the partition of a session. Raises RecordError if the name is invalid."""

    async def append(self, record: ModelCall | SessionEvent) -> None:
        """Append a record; return once the brokers and the fold have it."""

    async def latest(self, session: str) -> None:
        """Bring a session up to date for its next call."""

    async def current(self, partition: int) -> PartitionSessions:
        """Return the fold of a partition with everything that is on the log now."""


class CallCapture:
    """Forwards the calls of sessions to servers, and records them."""

    def __init__(
        self,
        upstream: Upstream,
        log: SessionLog,
        rules: CaptureRules,
        on_recorded: Callable[[SessionEvent, ModelCall], None] = lambda _start, _call: None,
    ) -> None:
        """`on_recorded` receives the start of the session and the call once it is on the log."""
        self._upstream, self._log, self._rules, self._on_recorded = upstream, log, rules, on_recorded
        self._delivered: dict[str, set[str]] = {}
        """Calls, by session, whose whole answers this process has delivered."""
        self._in_flight: dict[tuple[str, str], asyncio.Future[ModelCall]] = {}
        self._reserved: dict[tuple[str, str], set[int]] = {}
        """Numbers of the repetitions that are being recorded, by session and request."""
        self._sent: Counter[str] = Counter()
        """Requests forwarded, by session."""
        self.calls = 0
        """Calls recorded."""

    def delivered(self, session: CapturedSession, call: ModelCall) -> None:
        """Note that the agent has the whole answer of a call."""
        self._delivered.setdefault(session.name, set()).add(call.uid)

    def forget(self, session: str) -> None:
        """Forget a session that accepts no more calls."""
        self._delivered.pop(session, None)
        del self._sent[session]

    def undelivered(self, session: CapturedSession, request: AgentRequest, *, first_attempt: bool) -> ModelCall | None:
        """Return an equal recorded call whose answer this process has not delivered: the oldest one for a first
        attempt, the newest one for a retry; None if there is none."""
        delivered = self._delivered.get(session.name, set())
        calls = [call for call in session.answered(request.digest) if call.uid not in delivered]
        return next(iter(calls if first_attempt else reversed(calls)), None)

    async def _repeated(
        self, session: CapturedSession, request: AgentRequest, *, first_attempt: bool
    ) -> ModelCall | None:
        """Return the call that a request repeats; None if the request is new.

        A request is also new if its client says that this is the first attempt and the answers of all equal requests
        have been delivered. Raises the error of an equal request in flight.
        """
        call = self.undelivered(session, request, first_attempt=first_attempt)
        if call is not None or first_attempt:
            return call
        key = session.name, request.digest
        if key in self._in_flight:
            # A retry repeats the newest equal request, not one that was answered before.
            return await self._equal_call(key)
        return next(reversed(session.answered(request.digest)), None)

    def answer_of(self, session: CapturedSession, request: AgentRequest, call: ModelCall) -> dict[str, Any]:
        """Return the answer of a recorded call as it was first given."""
        answer: dict[str, Any] = decode(call.body)
        # A prompt is built from all calls before it.
        return with_prompt(answer, session.sequences.by_uid[call.uid].prompt) if request.wants_tokens else answer

    async def answer(
        self, session: CapturedSession, request: AgentRequest, *, first_attempt: bool = False
    ) -> tuple[ModelCall, dict[str, Any]]:
        """Return the call of a request and its answer; a new request is first sent to a server and recorded.

        Raises SessionClosed, InferenceUnavailable, InferenceRefused, UpstreamRefused, and errors of writes to the log.
        """
        await self._log.latest(session.name)
        if call := await self._repeated(session, request, first_attempt=first_attempt):
            return call, self.answer_of(session, request, call)
        with self._announced((session.name, request.digest)) as recorded:
            call = await self._new_call(session, request, first_attempt=first_attempt)
            recorded.set_result(call)
        return call, self.answer_of(session, request, call)

    async def _equal_call(self, key: tuple[str, str]) -> ModelCall | None:
        """Wait for the equal request in flight, and return its call; None if there is none, or its client left.

        Raises the error with which that request failed.
        """
        while (recorded := self._in_flight.get(key)) is not None:
            await asyncio.wait([recorded])
            if not recorded.cancelled():
                return recorded.result()
        return None

    @contextmanager
    def _announced(self, key: tuple[str, str]) -> Iterator[asyncio.Future[ModelCall]]:
        """Let equal requests wait for the call that the caller makes within this context."""
        recorded = self._in_flight[key] = asyncio.get_running_loop().create_future()
        try:
            yield recorded
        except (asyncio.CancelledError, GeneratorExit):
            recorded.cancel()
            raise
        except BaseException as error:
            recorded.set_exception(error)
            recorded.exception()  # otherwise asyncio reports the error as never retrieved if no other caller waits
            raise
        finally:
            if self._in_flight.get(key) is recorded:
                del self._in_flight[key]

    async def _new_call(self, session: CapturedSession, request: AgentRequest, *, first_attempt: bool) -> ModelCall:
        self._check_open(session)
        body = self._server_body(session, request)
        body.pop("stream", None)
        body.pop("stream_options", None)
        began = time.time()
        turn = partial(previous_turn, request, session.sequences)
        answer = await self._upstream.call(session.name, f"/{request.route}", body, turn)
        return await self._record(
            session,
            request,
            body,
            answer.body,
            answer.url,
            began,
            uid=_uid(request),
            first_attempt=first_attempt,
        )

    async def stream(
        self, session: CapturedSession, request: AgentRequest, *, first_attempt: bool = False
    ) -> AsyncGenerator[Mapping[str, Any] | str, None]:
        """Yield the events of a streamed answer; the events that complete it follow once the call is recorded.

        Raises the errors of `answer`, before the first event or after it. It also raises InferenceUnavailable if the
        connection to the server breaks or the server's stream ends too early or with an error, and ConnectionResetError
        after the first event if the recorded answer is not the one that was streamed.
        """
        await self._log.latest(session.name)
        chat = ROUTES[request.route] == "chat"
        usage = request.wants_usage
        call = await self._repeated(session, request, first_attempt=first_attempt)
        if call is None:
            with self._announced((session.name, request.digest)) as recorded:
                self._check_open(session)
                body = {
                    **self._server_body(session, request),
                    "stream": True,
                    "stream_options": {"include_usage": True},
                }
                uid, began, url, label = _uid(request), time.time(), "", ""
                whole = StreamedAnswer(chat=chat)
                held: list[dict[str, Any]] = []
                begun = False
                turn = partial(previous_turn, request, session.sequences)
                async for streamed in self._upstream.stream(session.name, f"/{request.route}", body, turn):
                    url, label = streamed.url, streamed.label
                    if streamed.data == DONE:
                        break
                    part = event_of(streamed.data, url)
                    if error := error_in(part):
                        raise InferenceUnavailable(f"{url} ended a stream with an error: {error}")
                    whole.add(part)
                    if not part.get("choices") and not usage:
                        continue
                    held.append(agent_answer(request, part, uid))
                    if not whole.complete:
                        for ready in held:
                            begun = True
                            yield ready
                        held.clear()
                if not whole.complete:
                    raise InferenceUnavailable(f"{url} ended a stream before the answer was complete")
                call = await self._record(
                    session,
                    request,
                    body,
                    labelled(whole.body(), label),
                    url,
                    began,
                    uid=uid,
                    first_attempt=first_attempt,
                )
                recorded.set_result(call)
            if call.uid == uid:
                for ready in held:
                    yield ready
                self.delivered(session, call)
                yield DONE
                return
            if begun:
                raise ConnectionResetError("another answer to this request is recorded; a retry gets it")
        for ready in events_of(self.answer_of(session, request, call), chat=chat, usage=usage):
            yield ready
        self.delivered(session, call)
        yield DONE

    def _check_open(self, session: CapturedSession) -> None:
        if session.closed or session.finished or session.ended:
            why = (session.closed.reason if session.closed else "") or "it has ended"
            raise SessionClosed(f"session {session.name} accepts no more calls: {why}; start another session")
        if len(session.calls) >= self._rules.max_calls:
            raise SessionClosed(
                f"session {session.name} has made {len(session.calls)} calls, the maximum (gateway.max_calls)"
            )

    async def know(self, session: CapturedSession, uid: str) -> None:
        """Bring a session up to date unless it has the call of this uid. Raises errors of reading the log."""
        if uid not in session.sequences.by_uid:
            await self._log.current(self._log.partition_of(session.name))

    async def prompt_tokens(self, session: CapturedSession, request: AgentRequest) -> int:
        """Return the number of tokens of a chat request's prompt, as a server counts it when it samples one token,
        which is not recorded. Raises SessionClosed, InferenceUnavailable, InferenceRefused, UpstreamRefused."""
        self._check_open(session)
        body = {**self._unseeded_body(session, request), "max_tokens": 1}
        turn = partial(previous_turn, request, session.sequences)
        answer = await self._upstream.call(session.name, f"/{request.route}", body, turn)
        return len(samples_of(answer.body, ROUTES[request.route], source=answer.url)[0].prompt_tokens)

    def _unseeded_body(self, session: CapturedSession, request: AgentRequest) -> dict[str, Any]:
        return server_request(
            request,
            model=self._upstream.model,
            temperature=self._rules.temperatures.get(session.start.environment, self._rules.temperature),
            sampling=self._rules.sampling,
        )

    def _server_body(self, session: CapturedSession, request: AgentRequest) -> dict[str, Any]:
        body = self._unseeded_body(session, request)
        if self._rules.seed is not None and body.get("seed") is None:
            body["seed"] = row_seed(self._rules.seed, session.episode, self._sent[session.name]) >> 1
        self._sent[session.name] += 1
        return body

    async def _record(
        self,
        session: CapturedSession,
        request: AgentRequest,
        body: Mapping[str, Any],
        answer: dict[str, Any],
        url: str,
        began: float,
        *,
        uid: str,
        first_attempt: bool,
    ) -> ModelCall:
        """Record a call and return it; if another process recorded the same request first, return its call."""
        samples = samples_of(answer, ROUTES[request.route], source=url)
        if not samples:
            raise InferenceRefused(f"{url} answered without a choice")
        if any(sample.aborted for sample in samples):
            # The tokens so far are no answer of the policy. A retry of the agent gets a whole one.
            raise InferenceUnavailable(f"{url} aborted the request before its answer was complete")
        versions = await self._upstream.versions_of({span.label for sample in samples for span in sample.spans})
        self._upstream.note_version(url, max(versions.values(), default=-1))
        self._check_open(session)
        if known := self.undelivered(session, request, first_attempt=first_attempt):
            return known
        key = session.name, request.digest
        reserved = self._reserved.setdefault(key, set())
        repetition = len(session.answered(request.digest))
        while repetition in reserved:
            repetition += 1
        reserved.add(repetition)
        try:
            delta = session.sequences.delta_of(np.asarray(samples[0].prompt_tokens, "<i4"), request.messages)
            call = ModelCall(
                session=session.name,
                uid=uid,
                number=len(session.calls),
                request=request.digest,
                repetition=repetition,
                route=request.route,
                parent=delta.parent,
                parent_answer=delta.parent_answer,
                shared=delta.shared,
                prompt=delta.prompt,
                prompt_digest=delta.digest,
                messages_shared=delta.messages_shared,
                messages=delta.messages,
                answers=call_answers(samples, versions),
                body=encode(agent_answer(request, answer, uid)).decode(),
                sampling={**recorded_sampling(request.route, body), **request.notes},
                replica_id=samples[0].replica_id or url,
                author=self._rules.author,
                began=began,
                answered=time.time(),
            )
            await self._log.append(call)
            self._on_recorded(session.start, call)
        finally:
            reserved.discard(repetition)
            if not reserved:
                self._reserved.pop(key, None)
        self.calls += 1
        counted = {each.repetition: each for each in session.answered(request.digest)}
        if repetition not in counted:
            self._check_open(session)
            raise SessionClosed(f"session {session.name} was closed while the call was made; start another session")
        return counted[repetition]


def _uid(request: AgentRequest) -> str:
    return f"{request.prefix}{uuid.uuid4().hex}"
