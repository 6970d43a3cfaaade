"""The protocol of tokenizers, as the inference server needs it."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable


class TokenCodec(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    @property
    def eos_ids(self) -> Sequence[int]:
        """Tokens that end every answer."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text. Raises a RollstreamError or ValueError if it cannot be encoded."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; the end token has no text."""


@runtime_checkable
class NamedTokenCodec(TokenCodec, Protocol):
    """A tokenizer of a checkpoint, whose special tokens have names."""

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its text in the vocabulary; None if there is no such token."""

    def to_json(self) -> str:
        """Return the tokenizer as the text of a tokenizer.json."""
