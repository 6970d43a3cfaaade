"""Chooses the chat template of an inference server."""

import json
from pathlib import Path

from rollstream.producers.inference.chat.jinja_template import JinjaTemplate
from rollstream.producers.inference.chat.library_template import LibraryTemplate
from rollstream.producers.inference.chat.plain_template import PlainTemplate
from rollstream.producers.inference.chat.template import ChatTemplate
from rollstream.producers.inference.token_codec import TokenCodec
from rollstream.topics.errors import ConfigurationError

PLAIN = "plain"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


def chat_template(setting: str, tokenizer: TokenCodec, checkpoint: str) -> ChatTemplate:
    """Return the template that `setting`, the value of `inference.chat_template`, names.

    `checkpoint` is the directory of the model's checkpoint, empty if there is none. Raises ConfigurationError.
    """
    config = _tokenizer_config(Path(checkpoint)) if checkpoint else {}
    if setting == PLAIN:
        return PlainTemplate(tokenizer)
    if not setting:
        source = _own_template(Path(checkpoint), config) if checkpoint else ""
        return JinjaTemplate(tokenizer, source, _special_tokens(config)) if source else PlainTemplate(tokenizer)
    path = Path(setting)
    if path.suffix == ".jinja" or path.is_file():
        return JinjaTemplate(tokenizer, _read(path), _special_tokens(config))
    return LibraryTemplate(tokenizer, setting)


def _own_template(directory: Path, config: dict[str, object]) -> str:
    """Return the template stored with a tokenizer; of several, the template for tools. Empty if there is none."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return _read(file)
    templates = config.get("chat_template")
    if isinstance(templates, list):
        named = {entry.get("name"): entry.get("template") for entry in templates if isinstance(entry, dict)}
        templates = named.get("tool_use") or named.get("default")
    return templates if isinstance(templates, str) else ""


def _special_tokens(config: dict[str, object]) -> dict[str, str]:
    """Return the texts of special tokens, which templates use by name."""
    tokens = {name: config.get(name) for name in _SPECIAL_TOKENS}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _tokenizer_config(directory: Path) -> dict[str, object]:
    file = directory / "tokenizer_config.json"
    if not file.is_file():
        return {}
    try:
        config = json.loads(_read(file))
    except ValueError as error:
        raise ConfigurationError(f"{file} is not JSON: {error}") from error
    return config if isinstance(config, dict) else {}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"the chat template {path} cannot be read: {error}; set inference.chat_template"
        ) from error
