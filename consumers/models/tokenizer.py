"""The tokenizer protocol, and a character tokenizer for small tasks: printable ASCII, newline, padding and end.

Its encoding and decoding are inverse to each other on text of the vocabulary; anything else is refused, never replaced.
"""

import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rollstream.topics.errors import RollstreamError


class PromptRefused(RollstreamError):
    """A text is outside the tokenizer's vocabulary, or a request does not fit the sampler's shapes."""


PADDING, END = "\ufffd", "<|endoftext|>"
"""Names of the special tokens of a CharacterTokenizer."""
PRINTABLE_ASCII = string.digits + string.ascii_letters + string.punctuation + " \n"


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def eos_id(self) -> int:
        """The token that ends a text."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """All tokens that end a completion, including `eos_id`."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without special tokens. Raises PromptRefused if it cannot be encoded."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without end tokens."""


@dataclass(frozen=True)
class CharacterTokenizer:
    """Token ids are 0 for padding, 1 for the end of a text, then the characters of `vocabulary` in order."""

    vocabulary: str = PRINTABLE_ASCII
    pad_id: int = field(default=0, init=False)
    eos_id: int = field(default=1, init=False)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The one token that ends a text."""
        return (self.eos_id,)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, including padding and end."""
        return len(self.vocabulary) + 2

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without special tokens. Raises PromptRefused for a character outside the vocabulary."""
        ids = [self.vocabulary.find(character) for character in text]
        if -1 in ids:
            unknown = text[ids.index(-1)]
            raise PromptRefused(f"character {unknown!r} of {text!r} is not in the tokenizer's vocabulary; remove it")
        return [identifier + 2 for identifier in ids]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids. The end token is omitted; padding becomes U+FFFD, so that it matches no answer, and so do
        ids of a model with a larger vocabulary."""
        characters = dict(enumerate(self.vocabulary, 2))
        return "".join(characters.get(identifier, "\ufffd") for identifier in ids if identifier != self.eos_id)

    def texts(self) -> list[str]:
        """Text of each token, by id."""
        return [PADDING, END, *self.vocabulary]
