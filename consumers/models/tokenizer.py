"""A character tokenizer for the small tasks: one token per printable ASCII character, newline, padding and end.

Encoding and decoding are each other's inverse on text of the vocabulary; anything else is refused, never replaced.
"""

import string
from collections.abc import Iterable
from dataclasses import dataclass, field

from consumers.models.errors import PromptRefused

PRINTABLE_ASCII = string.digits + string.ascii_letters + string.punctuation + " \n"


@dataclass(frozen=True)
class CharacterTokenizer:
    """Token ids are 0 for padding, 1 for the end of a text, then the characters of `vocabulary` in order."""

    vocabulary: str = PRINTABLE_ASCII
    pad_id: int = field(default=0, init=False)
    eos_id: int = field(default=1, init=False)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, the two special ones included."""
        return len(self.vocabulary) + 2

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without special tokens. Raises PromptRefused for a character outside the vocabulary."""
        ids = [self.vocabulary.find(character) for character in text]
        if -1 in ids:
            unknown = text[ids.index(-1)]
            raise PromptRefused(f"character {unknown!r} of {text!r} is not in the tokenizer's vocabulary; remove it")
        return [identifier + 2 for identifier in ids]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids. The end token is silent; padding shows as U+FFFD, so that it can match no answer."""
        characters = []
        for identifier in ids:
            if identifier == self.pad_id:
                characters.append("\ufffd")
            elif identifier != self.eos_id:
                characters.append(self.vocabulary[identifier - 2])
        return "".join(characters)
