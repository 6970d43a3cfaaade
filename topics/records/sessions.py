"""Records of `calls`: model calls of sessions, and other events of sessions."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rollstream.topics.records.arrays import Float32, Int32


@dataclass(frozen=True, kw_only=True)
class AnswerSpan:
    """Tokens `start` to `stop` of an answer, sampled by one version of the weights."""

    label: str
    version: int = -1
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, eq=False)
class CallAnswer:
    """One sampled answer of a model call; tokens and logprobs have shape [N]."""

    tokens: Int32
    logprobs: Float32
    spans: tuple[AnswerSpan, ...] = ()
    text: str = ""
    finish_reason: str = "stop"


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelCall:
    """One model call of a session; its full prompt is the first `shared` tokens of its parent call, then `prompt`."""

    session: str
    uid: str
    request: str
    prompt: Int32
    prompt_digest: str
    answers: tuple[CallAnswer, ...]
    number: int = 0
    repetition: int = 0
    route: str = "chat/completions"
    parent: str = ""
    parent_answer: int = 0
    shared: int = 0
    messages_shared: int = 0
    messages: str = "[]"
    body: str = "{}"
    sampling: Mapping[str, str] = field(default_factory=dict)
    replica_id: str = "unknown"
    author: str = ""
    began: float = 0.0
    answered: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SessionEvent:
    """One event of a session other than a model call."""

    session: str
    kind: Literal["start", "truncated", "reward", "failed", "end", "mark", "finishing", "finished"]
    author: str = ""
    wall_time: float = 0.0
    request: str = ""
    owner: Literal["gateway", "worker"] = "gateway"
    environment: str = ""
    example_id: str = ""
    group_id: str = ""
    group_size: int = 1
    member: int = 0
    policy_version: int = -1
    labeled: bool = False
    idle_timeout_ms: int = -1
    reward_timeout_ms: int = -1
    scored: bool = False
    reward: float = 0.0
    components: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    rollouts_end: int = -1
    uids: tuple[str, ...] = ()
