"""The base class of the dialects: the interface that the server uses, and the frame and growing parts of an answer.

All parts of a ChoiceStream together are the whole answer, because text is held back while later tokens may still change
it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from rollstream.producers.inference.chat.template import ToolCall
from rollstream.producers.inference.dialects.sampled_choices import SampledChoice, held_back
from rollstream.producers.inference.dialects.sampling_parameters import RequestLimits, SamplingRequest
from rollstream.producers.inference.token_codec import TokenCodec


@dataclass(frozen=True, kw_only=True)
class AnswerHeader:
    """Names and time of one answer."""

    identifier: str
    created: int
    """Seconds since the Unix epoch."""
    model: str
    replica_id: str

    def fields(self, kind: str) -> dict[str, Any]:
        """Return the first fields of an answer or of a stream's event; `kind` is OpenAI's type of object."""
        return {
            "id": self.identifier,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "replica_id": self.replica_id,
        }


def metadata(choices: Sequence[SampledChoice]) -> dict[str, Any]:
    """Return the newest policy version of the choices, also as SGLang's label; for a single choice also its spans."""
    newest = max((choice.highest_version for choice in choices), default=-1)
    spans = {"weight_versions": choices[0].version_fields["weight_versions"]} if len(choices) == 1 else {}
    return {"policy_version": newest, "metadata": {"weight_version": str(newest), **spans}}


def usage(request: SamplingRequest, choices: Sequence[SampledChoice]) -> dict[str, int]:
    """Return OpenAI's count of tokens; each prompt counts once."""
    prompt_tokens = sum(map(len, request.prompts))
    completion_tokens = sum(len(choice.tokens) for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


@dataclass(frozen=True, kw_only=True)
class VisibleAnswer:
    """The part of a choice that a client sees and that later tokens do not change."""

    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StreamedPart:
    """The new part of a choice."""

    choice: SampledChoice
    """The choice so far."""
    start: int
    """Number of its tokens in earlier parts."""
    characters: int
    """Number of characters of these tokens, as the dialect counts them."""
    text: str
    reasoning: str
    tool_calls: Sequence[ToolCall]
    first_call: int
    """Number of its calls in earlier parts."""
    first: bool
    last: bool

    @property
    def tokens(self) -> Sequence[int]:
        """New token ids."""
        return self.choice.tokens[self.start :]

    @property
    def logprobs(self) -> Sequence[float]:
        """Log-probabilities of the new tokens."""
        return self.choice.logprobs[self.start :]


class ChoiceStream:
    """The stream of one choice; keeps track of what earlier parts contain."""

    def __init__(self, token_characters: Callable[[Sequence[int]], int]) -> None:
        """`token_characters` returns the number of characters of tokens, for the dialect's own use."""
        self._token_characters = token_characters
        self._characters = 0
        self._tokens = 0
        self._visible = VisibleAnswer(text="")
        self._begun = False
        self._ended = False
        """Whether the last part was returned."""

    def advance(self, choice: SampledChoice, visible: VisibleAnswer) -> StreamedPart | None:
        """Return the new part, or None if nothing is new. A choice with a finish reason is complete."""
        last = choice.finish_reason is not None
        if self._ended or not (last or len(choice.tokens) > self._tokens):
            return None
        before = self._visible
        # Text that was already sent stays, even if the parser no longer shows it.
        visible = replace(
            visible,
            text=visible.text if visible.text.startswith(before.text) else before.text,
            reasoning=visible.reasoning if visible.reasoning.startswith(before.reasoning) else before.reasoning,
        )
        part = StreamedPart(
            choice=choice,
            start=self._tokens,
            characters=self._characters,
            text=visible.text[len(before.text) :],
            reasoning=visible.reasoning[len(before.reasoning) :],
            tool_calls=visible.tool_calls[len(before.tool_calls) :],
            first_call=len(before.tool_calls),
            first=not self._begun,
            last=last,
        )
        self._characters += self._token_characters(part.tokens)
        self._tokens, self._visible = len(choice.tokens), visible
        self._begun, self._ended = True, last
        return part


class DialectRequest(Protocol):
    """A valid request of any dialect."""

    @property
    def sampling(self) -> SamplingRequest:
        """The prompts and how to sample after them."""

    @property
    def stream(self) -> bool:
        """Whether the answer is a stream of server-sent events."""

    @property
    def include_usage(self) -> bool:
        """Whether the last event of a stream counts the tokens."""


R = TypeVar("R", bound=DialectRequest)


class Dialect(ABC, Generic[R]):
    """Parses bodies of one endpoint, and builds its answers."""

    prefix: str
    """Prefix of the identifier of an answer."""
    stream_kind: str
    """Value of `object` in the events of a stream."""

    def __init__(self, tokenizer: TokenCodec, limits: RequestLimits) -> None:
        self.tokenizer = tokenizer
        self.limits = limits

    @abstractmethod
    def parse(self, body: Mapping[str, Any], session: str) -> R:
        """Parse a request's body; `session` is empty if it has no session. Raises BadRequest, naming the parameter."""

    @abstractmethod
    def answer(self, request: R, choices: Sequence[SampledChoice], header: AnswerHeader) -> Any:
        """Return the whole answer, as JSON."""

    @abstractmethod
    def part(self, request: R, part: StreamedPart, header: AnswerHeader) -> dict[str, Any]:
        """Return one event of a stream, with the new part of one choice."""

    def visible(self, request: R, choice: SampledChoice) -> VisibleAnswer:
        """Return the part of a choice that a client sees and that later tokens do not change."""
        if choice.finish_reason is not None:
            return VisibleAnswer(text=choice.text)
        return VisibleAnswer(text=held_back(choice.text, request.sampling.parameters.stop))

    def token_characters(self, request: R, tokens: Sequence[int]) -> int:
        """Return the number of characters of tokens, each decoded alone, if parts name it; else 0."""
        return 0

    def remember(self, request: R, choice: SampledChoice) -> None:
        """Remember a complete choice before its client receives it."""
