"""The growing answer of one choice, in parts: the text, tokens and calls that are new since the previous part. Pure.

All parts together are the whole answer, because text is held back while later tokens may still change it.
"""

from collections.abc import Callable, Sequence
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
