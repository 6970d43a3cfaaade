"""The sessions of one partition of `calls`: a pure fold over its records, the same in every gateway and in the ledger.

The broker's append times are its only clock, and only records change a session. A session whose time is up ends when a
record that marks it is read. A gateway that began to write rollouts is replaced when another gateway announces after
takeover_s that it writes them.

A session is named `GROUP.MEMBER`, so its name contains its group, which determines its partition of `calls`. A worker's
further attempts at the same episode are named `GROUP.MEMBER-2` and so on. A session key is the name and a code computed
from it with the gateway's secret, so any gateway with the same secret can check it, and none stores it.
"""

import hashlib
import hmac
import re
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from rollstream.producers.episodes.call_sequences import CallSequences
from rollstream.topics.errors import RecordError
from rollstream.topics.records import ModelCall, SessionEvent
from rollstream.topics.wire.keys import encode_key, partition_of
from rollstream.topics.wire.validation import REWARD_LIMIT

_GROUP = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_MEMBER = re.compile(r"[0-9]+(-[0-9]+)?")
_FURTHER_ATTEMPT = re.compile(r"(.+\.[0-9]+)-[0-9]+")
_SEPARATOR = "~"
_CODE_BYTES = 16


def session_name(group: str, member: int, attempt: int = 1) -> str:
    """Return the name of an attempt's session. Raises RecordError if the group's name cannot be part of a URL."""
    if not _GROUP.fullmatch(group):
        raise RecordError(
            f"group_id {group[:64]!r} cannot be part of a URL: use up to 200 letters, digits, '.', '_' and '-'"
        )
    return f"{group}.{member}" if attempt == 1 else f"{group}.{member}-{attempt}"


def group_of(session: str) -> str:
    """Return the group in a session's name. Raises RecordError if the name is invalid."""
    group, _, member = session.rpartition(".")
    if not (group and _MEMBER.fullmatch(member)):
        raise RecordError(f"no session is named {session[:64]!r}; POST /rl/start_session starts one")
    return group


def episode_of(session: str) -> str:
    """Return the episode of a session, `GROUP.MEMBER`, which all attempts at a member share."""
    again = _FURTHER_ATTEMPT.fullmatch(session)
    return again[1] if again else session


def partition_of_group(group: str, partitions: int) -> int:
    """Return the partition of `calls` that holds all sessions of a group."""
    return partition_of(encode_key(group), partitions)


def session_key(session: str, secret: str) -> str:
    """Return the key that authorizes an agent to make the calls of a session."""
    return f"{session}{_SEPARATOR}{_code(session, secret)}"


def session_of_key(key: str, secret: str) -> str | None:
    """Return the session of a key; None if the key was not made with this secret."""
    session, separator, code = key.rpartition(_SEPARATOR)
    right = separator and hmac.compare_digest(code.encode(errors="replace"), _code(session, secret).encode())
    return session if right else None


def _code(session: str, secret: str) -> str:
    return hashlib.blake2b(
        session.encode(errors="replace"), key=secret.encode()[:64], digest_size=_CODE_BYTES
    ).hexdigest()


@dataclass(frozen=True)
class Intent:
    """The announcement that a gateway writes a session's rollouts, and its append time."""

    author: str
    append_ms: int
    rollouts_end: int


@dataclass(frozen=True)
class Closed:
    """The fate of a session's calls: rollouts if `reason` is empty, else a cancellation."""

    reason: str = ""
    """Why the episode is cancelled; empty if it becomes rollouts."""

    @property
    def cancelled(self) -> bool:
        """Whether no rollouts are written."""
        return bool(self.reason)


@dataclass(eq=False)
class CapturedSession:
    """One session, as its records describe it."""

    start: SessionEvent
    start_offset: int
    policy_version: int
    """Policy version stamped on the whole group when its first session started."""
    last_ms: int
    """Append time of its last record; marks, late calls and records about the writing of rollouts do not count."""
    calls: list[ModelCall] = field(default_factory=list)
    """Calls in the order of the log, retries included."""
    sequences: CallSequences = field(default_factory=CallSequences)
    reward: float | None = None
    components: dict[str, float] = field(default_factory=dict)
    turn_rewards: dict[str, float] = field(default_factory=dict)
    failure: str = ""
    """Why the episode cannot be trained on; empty if it can."""
    cut_calls: set[str] = field(default_factory=set)
    """Uids of the calls after which a server refused the next one, because the context had become too long."""
    refusal: str = ""
    """What the server said when it last refused a call for its length."""
    ended: bool = False
    abandoned: bool = False
    reward_overdue: bool = False
    intents: list[Intent] = field(default_factory=list)
    finished: SessionEvent | None = None
    last_author: str = ""
    """Process that wrote the last event that counts for `last_ms`; empty if there is none after the start."""
    counted_calls: int = 0
    """Calls without retries."""
    retried_calls: int = 0
    """Calls that repeat a recorded call; only the first counts."""
    late_calls: int = 0
    """Calls recorded after the session ended or was closed; no rollout contains them."""
    _settled: Closed | None = None
    _answered: dict[str, dict[int, ModelCall]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the session."""
        return self.start.session

    @property
    def episode(self) -> str:
        """Name of its episode, with which the uids of its rollouts begin: the name of the first attempt's session."""
        return episode_of(self.name)

    @property
    def scored(self) -> bool:
        """Whether it has a reward for the whole episode or for a call."""
        return self.reward is not None or bool(self.turn_rewards)

    @property
    def closed(self) -> Closed | None:
        """Its fate; None while it is open, because it has not ended or waits for its reward."""
        if self._settled is not None:
            return self._settled
        if self.failure:
            return Closed(self.failure)
        if not (self.ended or self.abandoned):
            return None
        if not any(answer.tokens.size for call in self.calls for answer in call.answers):
            return Closed(f"no model call was made{self.refusal and ': '}{self.refusal}")
        if self.scored:
            return Closed()
        if self.abandoned:
            return Closed(f"abandoned: no record came for {self.start.idle_timeout_ms / 1000:g} s")
        if self.reward_overdue:
            return Closed(f"no reward came for {self.start.reward_timeout_ms / 1000:g} s after the end")
        return None

    @property
    def deadline_ms(self) -> int:
        """Append time from which a mark ends the session or its wait for a reward."""
        return self.last_ms + (self.start.reward_timeout_ms if self.ended else self.start.idle_timeout_ms)

    def writer(self, takeover_ms: int) -> Intent | None:
        """Return the intent in force; None if no gateway has begun to write. A later intent replaces an earlier one if
        it is from the same gateway or was appended at least `takeover_ms` later."""
        current: Intent | None = None
        for intent in self.intents:
            if (
                current is None
                or intent.author == current.author
                or intent.append_ms >= current.append_ms + takeover_ms
            ):
                current = intent
        return current

    def answered(self, request: str) -> list[ModelCall]:
        """Return the recorded calls with this request digest, one for each repetition number.

        If several records have the same number, because the call was retried, the first one counts.
        """
        return list(self._answered.get(request, {}).values())

    def add_call(self, call: ModelCall, append_ms: int) -> None:
        """Add a call; after the session's end, count it as late. Raises RecordError, and fails the session, if the call
        cannot be trained on."""
        if self.closed or self.finished or self.ended:
            self.late_calls += 1
            return
        self.last_ms = append_ms
        try:
            self.sequences.add(call)
        except RecordError as error:
            self.failure = str(error)
            self.counted_calls += 1
            raise
        self.calls.append(call)
        counted = self._answered.setdefault(call.request, {}).setdefault(call.repetition, call)
        if counted is call:
            self.counted_calls += 1
        else:
            self.retried_calls += 1

    def add_event(self, event: SessionEvent, append_ms: int) -> None:
        """Add an event other than a start; rewards and ends after the session was closed change nothing."""
        if event.kind == "finishing":
            self.intents.append(Intent(event.author, append_ms, event.rollouts_end))
            return
        if event.kind == "finished":
            self._finish(event)
            return
        if self.closed or self.finished:
            return
        if event.kind == "mark":
            if append_ms >= self.deadline_ms:
                self.abandoned, self.reward_overdue = not self.ended, self.ended
            return
        self.last_ms, self.last_author = append_ms, event.author
        if event.kind == "failed":
            self.failure = event.reason or "the agent says so"
        elif event.kind == "truncated":
            self.cut_calls.update(event.uids)
            self.refusal = event.reason
        elif event.kind == "end":
            self.ended = True
        elif event.kind == "reward":
            self._add_reward(event)

    def _finish(self, event: SessionEvent) -> None:
        """Record the final event, and release the calls, which are no longer needed."""
        if self.finished is None:
            self._settled = Closed(event.reason or ("" if event.uids else "the episode was cancelled"))
            self.finished = event
            self.calls, self.sequences, self._answered = [], CallSequences(), {}

    def _add_reward(self, event: SessionEvent) -> None:
        if problem := reward_problem(event.reward if event.scored else None, event.components, event.turn_rewards):
            self.failure = problem
            return
        if event.scored:
            self.reward = event.reward
        self.components.update(event.components)
        self.turn_rewards.update(event.turn_rewards)


def reward_problem(reward: float | None, components: Mapping[str, float], turn_rewards: Mapping[str, float]) -> str:
    """Return why the rewards of a session cannot be trained on; empty if they can."""
    named = {"reward": 0.0 if reward is None else reward}
    named |= {f"components.{name}"[:100]: value for name, value in components.items()}
    named |= {f"turn_rewards.{name}"[:100]: value for name, value in turn_rewards.items()}
    for name, value in named.items():
        if not abs(value) <= REWARD_LIMIT:
            return f"{name} is {value}; it must be a number between -{REWARD_LIMIT:g} and {REWARD_LIMIT:g}"
    return ""


@dataclass
class PartitionSessions:
    """The sessions of one partition, by name."""

    keep_finished: int | None = None
    """Number of newest finished sessions that are remembered; None remembers all."""
    sessions: dict[str, CapturedSession] = field(default_factory=dict)
    position: int = 0
    """Offset after the last record applied."""
    orphans: int = 0
    """Calls of sessions that were never started."""
    problems: list[str] = field(default_factory=list)
    """The first hundred errors of records that do not fit their session."""
    open: dict[str, CapturedSession] = field(default_factory=dict)
    """Sessions whose rollouts are not written."""
    _groups: dict[str, dict[str, CapturedSession]] = field(default_factory=dict)
    _finished: deque[CapturedSession] = field(default_factory=deque)

    def names_in(self, group: str) -> Collection[str]:
        """Return the names of the known sessions of a group."""
        return self._groups.get(group, {}).keys()

    def apply(self, offset: int, append_ms: int, record: ModelCall | SessionEvent) -> CapturedSession | None:
        """Apply the next record; return the session that it belongs to, or None if there is none."""
        self.position = offset + 1
        session = self.sessions.get(record.session)
        if isinstance(record, SessionEvent) and record.kind == "start":
            if session is None:
                group = self._groups.setdefault(record.group_id, {})
                first = next(iter(group.values()), None)
                version = record.policy_version if first is None else first.policy_version
                session = CapturedSession(record, offset, version, append_ms)
                self.sessions[record.session] = self.open[record.session] = group[record.session] = session
            return session
        if session is None:
            self.orphans += isinstance(record, ModelCall)
            return None
        try:
            if isinstance(record, ModelCall):
                session.add_call(record, append_ms)
            else:
                session.add_event(record, append_ms)
        except RecordError as error:
            if len(self.problems) < 100:
                self.problems.append(str(error))
        if session.finished is not None and session.name in self.open:
            del self.open[session.name]
            self._finished.append(session)
            if self.keep_finished is not None and len(self._finished) > self.keep_finished:
                self._forget(self._finished.popleft())
        return session

    def _forget(self, session: CapturedSession) -> None:
        del self.sessions[session.name]
        group = self._groups[session.start.group_id]
        del group[session.name]
        if not group:
            del self._groups[session.start.group_id]
