"""What an environment is: prompts with stable ids, and episodes scored by a verifier.

Environments know text and rewards only. Tokens, policy versions, groups and Kafka are the worker's business, so any
library of tasks fits behind this protocol. `run` is the general form; most environments are a `SingleTurn`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "heldout")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One problem of an environment."""

    example_id: str
    """Stable name within the environment: the same problem has it in every process and every run."""
    text: str
    """What the policy is shown."""
    answer: str = ""
    """What the verifier compares with; empty where it needs none."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """Whatever else the verifier needs."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """A verifier's judgement."""

    reward: float
    """What is trained on."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Parts and companions of the reward by name; `exact` (1.0 or 0.0) where the environment knows success."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """Something said to the policy: by the user, the system or a tool."""

    role: Literal["system", "user", "tool"]
    text: str


class Reply(Protocol):
    """What `generate` returns. It carries more than this (tokens, logprobs, versions) for the worker to read."""

    @property
    def text(self) -> str:
        """The policy's words, without the end token or stop string."""

    @property
    def truncated(self) -> bool:
        """Whether a token limit cut it off."""


class Generate(Protocol):
    """Says something to the policy and returns its reply. All that was said before stays in the policy's context."""

    async def __call__(self, text: str) -> Reply: ...


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One finished interaction: what was said, in order, and what it was worth.

    The replies in `turns` are the objects `generate` returned, all of them: an episode is one sequence of tokens, and
    each call of `generate` appends to it.
    """

    turns: tuple[Message | Reply, ...]
    score: Score
    truncated: bool = False


class Environment(Protocol):
    """What the worker needs of an environment."""

    @property
    def name(self) -> str:
        """Part of every record's key; never changes within a run."""

    @property
    def max_tokens(self) -> int:
        """Most tokens the policy may say in one turn."""

    @property
    def stop(self) -> Sequence[str]:
        """Texts that end a turn, besides the model's own end token."""

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """The problems of a split, in an order that is the same in every process."""

    async def run(self, prompt: Prompt, generate: Generate) -> Episode:
        """Play one episode. `generate` may be awaited any number of times, one after the other."""


class SingleTurn(ABC):
    """An environment of one prompt and one response: subclasses give prompts and a score."""

    name: str
    max_tokens: int
    stop: Sequence[str] = ()

    @abstractmethod
    def prompts(self, split: Split) -> Sequence[Prompt]:
        """The problems of a split, in an order that is the same in every process."""

    @abstractmethod
    def score(self, prompt: Prompt, response_text: str, truncated: bool) -> Score:
        """Judge a response; `truncated` says that a limit cut it off."""

    async def run(self, prompt: Prompt, generate: Generate) -> Episode:
        """One question, one answer, one score."""
        reply = await generate(prompt.text)
        return Episode(
            turns=(Message(role="user", text=prompt.text), reply),
            score=self.score(prompt, reply.text, reply.truncated),
            truncated=reply.truncated,
        )
