"""The answer to one choice as it grows: what is new of its text, tokens and calls since the part before. Pure.

All parts together are the whole answer: text is kept back while later tokens may still change it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rollstream.producers.inference.chat.messages import ToolCall
from rollstream.producers.inference.dialects.sampled_choices import SampledChoice


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
    """Number of its tokens that earlier parts hold."""
    text: str
    reasoning: str
    tool_calls: Sequence[ToolCall]
    first_call: int
    """Number of its calls that earlier parts hold."""
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
    """The stream of one choice: it knows what earlier parts hold."""

    def __init__(self) -> None:
        self._tokens = 0
        self._visible = VisibleAnswer(text="")
        self._begun = False
        self.ended = False
        """Whether the last part is out."""

    def advance(self, choice: SampledChoice, visible: VisibleAnswer) -> StreamedPart | None:
        """Return what is new, None if nothing is. A choice with a finish reason is complete."""
        last = choice.finish_reason is not None
        if self.ended or not (last or len(choice.tokens) > self._tokens):
            return None
        before = self._visible
        # A parser that took back what it showed cannot reach what is sent already.
        visible = replace(
            visible,
            text=visible.text if visible.text.startswith(before.text) else before.text,
            reasoning=visible.reasoning if visible.reasoning.startswith(before.reasoning) else before.reasoning,
        )
        part = StreamedPart(
            choice=choice,
            start=self._tokens,
            text=visible.text[len(before.text) :],
            reasoning=visible.reasoning[len(before.reasoning) :],
            tool_calls=visible.tool_calls[len(before.tool_calls) :],
            first_call=len(before.tool_calls),
            first=not self._begun,
            last=last,
        )
        self._tokens, self._visible = len(choice.tokens), visible
        self._begun, self.ended = True, last
        return part
