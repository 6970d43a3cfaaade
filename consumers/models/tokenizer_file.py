"""The tokenizer in a model's files: tokenizer.json, and the end tokens of the model's configuration.

Text is encoded as it is: special tokens in the text are recognized, and no special token is added.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollstream.consumers.models.huggingface import CONFIG, read_json
from rollstream.consumers.models.tokenizer import END, PADDING, CharacterTokenizer, PromptRefused
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.files.atomic_files import write_bytes

TOKENIZER = "tokenizer.json"
_GENERATION_CONFIG = "generation_config.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_UNKNOWN = "\ufffd"


class TokenizerFile:
    """Text to token ids and back, with the model's own tokenizer."""

    def __init__(self, tokenizer: Any, eos_ids: Sequence[int]) -> None:
        """`tokenizer` is a Tokenizer of the package tokenizers; the first of `eos_ids` ends a text, and each of them
        ends a completion."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.eos_ids = tuple(eos_ids)
        self.eos_id = self.eos_ids[0]
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Raises PromptRefused if the vocabulary cannot express it."""
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as error:  # The package raises nothing more specific.
            raise PromptRefused(f"the tokenizer cannot encode {text[:80]!r}: {error}") from error
        return ids

    def token_id(self, token: str) -> int | None:
        """Id of a token by its text in the vocabulary; None if there is no such token."""
        identifier: int | None = self._tokenizer.token_to_id(token)
        return identifier

    def to_json(self) -> str:
        """Text of the tokenizer.json."""
        text: str = self._tokenizer.to_str()
        return text

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids. End tokens are omitted, other special tokens are kept, unknown ids become U+FFFD."""
        pieces: list[list[int]] = [[]]
        for identifier in ids:
            if self._tokenizer.id_to_token(identifier) is None:
                pieces.append([])
            elif identifier not in self.eos_ids:
                pieces[-1].append(identifier)
        return _UNKNOWN.join(self._tokenizer.decode(piece, skip_special_tokens=False) for piece in pieces)

    def texts(self) -> list[str]:
        """Text of each token by itself, by id, special tokens by their names.

        Bytes that are no whole character are escaped, as in `\\xe2`. The space before a word, which decoders omit at
        the beginning of a text, is there.
        """
        ids = range(self.vocab_size)
        texts = self._tokenizer.decode_batch([[each] for each in ids], skip_special_tokens=False)
        return [_text_of(self._tokenizer.id_to_token(each), text) for each, text in zip(ids, texts, strict=True)]


def _text_of(token: str | None, text: str) -> str:
    """Return the text of a token, given its name in the vocabulary and how it is decoded alone."""
    if token is None:
        return _UNKNOWN
    if _UNKNOWN in text and all(character in _BYTES for character in token):
        return bytes(_BYTES[character] for character in token).decode("utf-8", "backslashreplace")
    return f" {text}" if token.startswith(_SPACE) and not text.startswith(" ") else text


def _byte_characters() -> dict[str, int]:
    """Return the characters by which byte-level vocabularies name bytes (openai/gpt-2, bytes_to_unicode)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + number): byte for number, byte in enumerate(others)}


_BYTES = _byte_characters()
_SPACE = "\u2581"
"""The space in vocabularies of SentencePiece."""


def character_tokenizer_files(tokenizer: CharacterTokenizer) -> dict[str, bytes]:
    """Return tokenizer.json, tokenizer_config.json and generation_config.json by name, each id as in `tokenizer`."""
    characters = {character: number + 2 for number, character in enumerate(tokenizer.vocabulary)}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    documents: dict[str, dict[str, Any]] = {
        TOKENIZER: {
            "version": "1.0",
            "added_tokens": [{"id": tokenizer.eos_id, "content": END, **special}],
            "decoder": {"type": "Fuse"},
            # No merge: each character is a token.
            "model": {
                "type": "BPE",
                "vocab": {PADDING: tokenizer.pad_id, END: tokenizer.eos_id, **characters},
                "merges": [],
            },
        },
        _TOKENIZER_CONFIG: {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "clean_up_tokenization_spaces": False,
        },
        _GENERATION_CONFIG: {"eos_token_id": tokenizer.eos_id},
    }
    return {name: json.dumps(document, indent=2).encode() + b"\n" for name, document in documents.items()}


def load_tokenizer(path: Path | str) -> TokenizerFile:
    """Load the tokenizer of a checkpoint; `path` is the checkpoint's directory or the tokenizer.json in it.

    End tokens are eos_token_id of generation_config.json and config.json, else the eos_token of tokenizer_config.json.
    Raises ConfigurationError if there is no tokenizer or no end token, or if the tokenizer has more tokens than the
    model's vocab_size.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise ConfigurationError(
            "reading a tokenizer.json needs the package tokenizers: pip install 'rollstream[hf]'"
        ) from error
    file = Path(path) if Path(path).name == TOKENIZER else Path(path) / TOKENIZER
    directory = file.parent
    if not file.exists():
        raise ConfigurationError(f"there is no {file}; fetch it with the model")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # The package raises nothing more specific.
        raise ConfigurationError(f"{file} is not a tokenizer that the package tokenizers can read: {error}") from error
    loaded = TokenizerFile(tokenizer, _end_tokens(directory, tokenizer))
    rows = _optional(directory / CONFIG).get("vocab_size", loaded.vocab_size)
    if rows < loaded.vocab_size:
        raise ConfigurationError(f"{file} has {loaded.vocab_size} tokens and the model's vocab_size is {rows}")
    return loaded


def _end_tokens(directory: Path, tokenizer: Any) -> list[int]:
    """Ids that end a text, each once; ids from the generation configuration, if any, come first."""
    end_ids: list[int] = []
    for name in (_GENERATION_CONFIG, CONFIG):
        ids = _optional(directory / name).get("eos_token_id")
        end_ids += [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not end_ids:
        token = _optional(directory / _TOKENIZER_CONFIG).get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        identifier = tokenizer.token_to_id(text) if text else None
        end_ids = [] if identifier is None else [identifier]
    if not end_ids:
        raise ConfigurationError(
            f"no end token in {directory}: set eos_token_id in {_GENERATION_CONFIG}; otherwise sampling never ends"
        )
    return list(dict.fromkeys(end_ids))


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def write_character_tokenizer(directory: Path, tokenizer: CharacterTokenizer) -> None:
    """Write `character_tokenizer_files` to a directory."""
    for name, data in character_tokenizer_files(tokenizer).items():
        write_bytes(directory / name, data)
