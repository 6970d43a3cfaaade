"""Writes the character tokenizer as the files of a Hugging Face checkpoint, so that other engines tokenize alike."""

from pathlib import Path

from rollstream.consumers.models.huggingface import write_json
from rollstream.consumers.models.tokenizer import CharacterTokenizer
from rollstream.consumers.models.tokenizer_file import TOKENIZER

_END = "<|endoftext|>"
_PADDING = "\ufffd"
"""Text of the padding token, which is in no prompt and matches no answer."""


def write_character_tokenizer(directory: Path, tokenizer: CharacterTokenizer) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json, each id as in `tokenizer`."""
    characters = {character: number + 2 for number, character in enumerate(tokenizer.vocabulary)}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    document = {
        "version": "1.0",
        "added_tokens": [{"id": tokenizer.eos_id, "content": _END, **special}],
        "decoder": {"type": "Fuse"},
        # No merge: each character is a token.
        "model": {
            "type": "BPE",
            "vocab": {_PADDING: tokenizer.pad_id, _END: tokenizer.eos_id, **characters},
            "merges": [],
        },
    }
    write_json(directory / TOKENIZER, document)
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _END, "clean_up_tokenization_spaces": False}
    write_json(directory / "tokenizer_config.json", names)
    write_json(directory / "generation_config.json", {"eos_token_id": tokenizer.eos_id})
