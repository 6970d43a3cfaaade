"""The environment protocol: prompts with stable ids, and episodes scored by a verifier.

Environments handle text and rewards only. The worker handles tokens, policy versions, groups and Kafka, so any library
of tasks fits behind this protocol. It has two forms: an `Environment` exchanges texts with the policy, an
`AgentEnvironment` runs a program that calls the policy over HTTP. Most environments are a `SingleTurn`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "heldout")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One problem of an environment."""

    example_id: str
    """Name within the environment: the same for this problem in every process and every run."""
    text: str
    """Text shown to the policy."""
    answer: str = ""
    """Answer for the verifier to compare with; empty if the verifier needs none."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """Further data for the verifier."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """A verifier's judgement."""

    reward: float
    """Reward used for training."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Parts of the reward and further measures by name; `exact`, 1.0 or 0.0, says whether the task was solved. Without
    it, a reward of at least 1 counts as success."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """A message to the policy from the user, the system or a tool."""

    role: Literal["system", "user", "tool"]
    text: str


class Reply(Protocol):
    """The policy's reply, as `generate` returns it. It also carries data for the worker: tokens, logprobs, versions."""

    @property
    def text(self) -> str:
        """Text of the reply, without the end token or stop string."""

    @property
    def truncated(self) -> bool:
        """Whether a token limit cut the reply off."""


class Generate(Protocol):
    """Sends a text to the policy and returns its reply. All earlier turns stay in the policy's context."""

    async def __call__(self, text: str) -> Reply: ...


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One finished interaction: its turns in order, and its score.

    `turns` holds every object that `generate` returned: an episode is one sequence of tokens, and each call of
    `generate` appends to it.
    """

    turns: tuple[Message | Reply, ...]
    score: Score
    truncated: bool = False


class Environment(Protocol):
    """The interface between a worker and an environment."""

    @property
    def name(self) -> str:
        """Name in every record's key; it never changes within a run."""

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens in the policy's reply in one turn."""

    @property
    def stop(self) -> Sequence[str]:
        """Texts that end a turn, besides the model's own end token."""

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """The problems of a split, in an order that is the same in every process."""

    async def run(self, prompt: Prompt, generate: Generate) -> Episode:
        """Play one episode. `generate` may be awaited any number of times, one after the other."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """An address of the policy for one episode, for clients of OpenAI and Anthropic; every call becomes part of it."""

    base_url: str
    """URL that ends in /v1, as OpenAI's clients expect it."""
    api_key: str = field(repr=False)
    """API key for this episode."""
    model: str
    """Model name to send."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """The beginning of a chat, and the policy's next turn: an example that teaches a format."""

    messages: Sequence[Mapping[str, Any]]
    """Messages in the format of OpenAI's protocol."""
    tools: Sequence[Any] = ()
    """Functions, or their descriptions in OpenAI's format, that the policy is shown."""
    turn: str
    """The turn as the policy writes it, with tool calls in the format of its chat template."""


class AgentEnvironment(Protocol):
    """An environment that calls the policy itself, through an agent or a library of any kind.

    The tokens of its calls are recorded as they were sampled; it returns only the score.
    """

    @property
    def name(self) -> str:
        """Name in every record's key; it never changes within a run."""

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens that one of its calls requests for a reply."""

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """The problems of a split, in an order that is the same in every process."""

    async def play(self, prompt: Prompt, endpoint: Endpoint) -> Score:
        """Play one episode with calls to `endpoint`, and score it."""


class SingleTurn(ABC):
    """An environment of one prompt and one response: subclasses define prompts and a score."""

    name: str
    max_tokens: int
    stop: Sequence[str] = ()

    @abstractmethod
    def prompts(self, split: Split) -> Sequence[Prompt]:
        """The problems of a split, in an order that is the same in every process."""

    @abstractmethod
    def score(self, prompt: Prompt, response_text: str, truncated: bool) -> Score:
        """Score a response; `truncated` is True if a limit cut it off."""

    async def run(self, prompt: Prompt, generate: Generate) -> Episode:
        """Run a single-turn episode: one prompt, one response, one score."""
        reply = await generate(prompt.text)
        return Episode(
            turns=(Message(role="user", text=prompt.text), reply),
            score=self.score(prompt, reply.text, reply.truncated),
            truncated=reply.truncated,
        )
