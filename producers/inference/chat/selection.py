"""Chooses the chat template of an inference server."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollstream.producers.inference.chat.jinja_template import DEFAULT, FOR_TOOLS, JinjaTemplate
from rollstream.producers.inference.chat.library_template import LibraryTemplate
from rollstream.producers.inference.chat.plain_template import PlainTemplate
from rollstream.producers.inference.chat.template import ChatTemplate, TemplateRefused
from rollstream.producers.inference.token_codec import TokenCodec
from rollstream.topics.errors import ConfigurationError

PLAIN = "plain"
TEMPLATE_FILE, TEMPLATE_FOLDER = "chat_template.jinja", "additional_chat_templates"
"""Names under which transformers stores the default template, and further ones, next to a tokenizer."""
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def chat_template(
    setting: str, tokenizer: TokenCodec, checkpoint: str, variables: Mapping[str, Any] | None = None
) -> ChatTemplate:
    """Return the template that `setting`, the value of `inference.chat_template`, names, with these variables.

    `checkpoint` is the directory of the model's checkpoint, empty if there is none. Raises ConfigurationError.
    """
    template = _template(setting, tokenizer, checkpoint)
    try:
        return template.with_variables(variables) if variables else template
    except TemplateRefused as error:
        raise ConfigurationError(f"inference.chat_template_kwargs: {error}") from error


def _template(setting: str, tokenizer: TokenCodec, checkpoint: str) -> ChatTemplate:
    config = _tokenizer_config(Path(checkpoint)) if checkpoint else {}
    if setting == PLAIN:
        return PlainTemplate(tokenizer)
    if not setting:
        sources = _own_templates(Path(checkpoint), config) if checkpoint else {}
        return JinjaTemplate(tokenizer, sources, _special_tokens(config)) if sources else PlainTemplate(tokenizer)
    path = Path(setting)
    if path.suffix == ".jinja" or path.is_file():
        return JinjaTemplate(tokenizer, {DEFAULT: _read(path)}, _special_tokens(config))
    return LibraryTemplate(tokenizer, setting)


def _own_templates(directory: Path, config: dict[str, object]) -> dict[str, str]:
    """Return the templates stored with a tokenizer, by name. Empty if there is no default."""
    stored = config.get("chat_template")
    if isinstance(stored, list):
        named = {entry.get("name"): entry.get("template") for entry in stored if isinstance(entry, dict)}
    else:
        named = {DEFAULT: stored}
    files = {DEFAULT: directory / TEMPLATE_FILE, FOR_TOOLS: directory / TEMPLATE_FOLDER / f"{FOR_TOOLS}.jinja"}
    named |= {name: _read(file) for name, file in files.items() if file.is_file()}
    sources = {name: source for name in files if isinstance(source := named.get(name), str) and source}
    return sources if DEFAULT in sources else {}


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
