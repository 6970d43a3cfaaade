"""One answer of the engine while its tokens arrive. Each token is decoded a few times, however long the answer becomes.

A text is decoded from a token before its new tokens on, and the text of earlier tokens is kept, since further tokens
only add to a text, except to an incomplete character at its end. The whole text is decoded if they change more.
"""

from collections.abc import Sequence

from rollstream.producers.inference.decoding import SampledSequence
from rollstream.producers.inference.dialects.sampled_choices import SampledChoice, sampled_choice
from rollstream.producers.inference.dialects.sampling_parameters import SamplingParameters
from rollstream.producers.inference.dialects.stop_strings import UNKNOWN_CHARACTER, contains_stop
from rollstream.producers.inference.token_codec import TokenCodec


class GrowingText:
    """The text of tokens, to which further tokens are added."""

    def __init__(self, tokenizer: TokenCodec) -> None:
        self._tokenizer = tokenizer
        self._text = ""
        """Text of the first `_settled` tokens, whose last character is complete."""
        self._settled = 0
        self._start = 0
        """Token from which on tokens are decoded. The text of those from here to `_settled` is not empty, since a token
        may have another text at the beginning than elsewhere."""

    def text_of(self, tokens: Sequence[int]) -> str:
        """Return the text of all tokens, which begin with those of earlier calls."""
        known = self._tokenizer.decode(tokens[self._start : self._settled])
        window = self._tokenizer.decode(tokens[self._start :])
        text = self._text + window[len(known) :] if window.startswith(known) else self._tokenizer.decode(tokens)
        if not text.endswith(UNKNOWN_CHARACTER):
            if len(text) > len(self._text):
                self._start = self._settled
            self._text, self._settled = text, len(tokens)
        return text


class GrowingChoice:
    """The answer to one prompt."""

    def __init__(
        self, index: int, prompt: Sequence[int], parameters: SamplingParameters, tokenizer: TokenCodec
    ) -> None:
        self._index, self._prompt = index, prompt
        self._parameters, self._tokenizer = parameters, tokenizer
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._text = GrowingText(tokenizer)
        self._stopped = False

    def add(self, tokens: Sequence[int], logprobs: Sequence[float]) -> SampledChoice | None:
        """Return the choice with these further tokens, without its versions and finish reason; None if it was already
        cut at a stop. The choice is valid until the next call."""
        self._tokens.extend(tokens)
        self._logprobs.extend(logprobs)
        if self._stopped:
            return None
        text = self._text.text_of(self._tokens)
        if contains_stop(text, self._parameters.stop) or not self._parameters.stop_token_ids.isdisjoint(tokens):
            row = SampledSequence(self._tokens, self._logprobs, finish_reason="length")
            choice = sampled_choice(self._index, self._prompt, row, self._parameters, self._tokenizer, complete=False)
            self._stopped = choice.stop_reason is not None
            return choice
        return SampledChoice(
            index=self._index,
            prompt=self._prompt,
            tokens=self._tokens,
            logprobs=self._logprobs,
            text=text,
            finish_reason=None,
            stop_reason=None,
            versions=(),
        )
