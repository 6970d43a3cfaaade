"""The base class of the dialects: the interface that the server uses."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from rollstream.producers.inference.dialects.answer_frame import AnswerHeader
from rollstream.producers.inference.dialects.answer_stream import StreamedPart, VisibleAnswer
from rollstream.producers.inference.dialects.sampled_choices import SampledChoice, held_back
from rollstream.producers.inference.dialects.sampling_parameters import RequestLimits, SamplingRequest
from rollstream.producers.inference.token_codec import TokenCodec


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
