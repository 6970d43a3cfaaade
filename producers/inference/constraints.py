"""Constraints on the form of an answer, a JSON schema or calls of tools, as masks of the tokens that may come next.

The package llguidance, an extra, compiles them. A constrained answer is drawn from the masked distribution, and its
log-probabilities are under that one: its tokens are not the policy's own choice.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rollstream.producers.inference.chat import hermes
from rollstream.producers.inference.chat.template import Tool
from rollstream.producers.inference.decoding import TokenMask
from rollstream.producers.inference.dialects import fields
from rollstream.producers.inference.dialects.fields import BadRequest
from rollstream.producers.inference.token_codec import NamedTokenCodec, TokenCodec

if TYPE_CHECKING:
    import llguidance

_REPLACED = "\ufffd"
_SPACING = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
"""JSON with one space after each colon and comma: with free white space, a model may write nothing else for ever."""


class Constraints:
    """Compiles constraints for one tokenizer, from the first request on that has one."""

    def __init__(self, tokenizer: TokenCodec, vocab_size: int, *, call_markers: bool) -> None:
        """`vocab_size` is the model's; `call_markers` says whether the chat template marks calls as Hermes does."""
        self._codec, self._vocab_size, self._call_markers = tokenizer, vocab_size, call_markers
        self._tokenizer: llguidance.LLTokenizer | None = None

    def of(self, body: Mapping[str, Any], tools: Sequence[Tool]) -> Callable[[], TokenMask] | None:
        """Return the constraint of a body with these tools, a function that begins an answer; None if it has none.

        Raises BadRequest if the constraint is not supported, or llguidance is not installed.
        """
        form, choice = fields.mapping(body, "response_format"), body.get("tool_choice")
        schema = _schema(form)
        if choice in (None, "auto", "none"):
            return None if schema is None else self._compiled(_json(schema), "response_format", form)
        if schema is not None:
            raise BadRequest("a forced tool_choice excludes a response_format", "tool_choice")
        if not self._call_markers:
            raise BadRequest(
                f"tool_choice={fields.shown(choice)} is not supported here, because this chat template marks calls in "
                "another form; leave it out, or use auto or none",
                "tool_choice",
            )
        several = choice == "required" and body.get("parallel_tool_calls") is not False
        return self._compiled(_calls(_chosen(tools, choice), several=several), "tool_choice", choice)

    def _compiled(self, grammar: str, name: str, value: Any) -> Callable[[], TokenMask]:
        try:
            import llguidance
        except ImportError as error:
            raise BadRequest(
                f"{name}={fields.shown(value)} is not supported here, because answers are not constrained; leave it "
                "out, or install llguidance where this server runs: pip install 'rollstream[constraints]'",
                name,
            ) from error
        if self._tokenizer is None:
            self._tokenizer = _guided(self._codec, self._vocab_size)
        tokenizer = self._tokenizer
        if problem := llguidance.LLMatcher.validate_grammar(grammar, tokenizer):
            raise BadRequest(f"{name}={fields.shown(value)} cannot be compiled: {problem[:500]}", name)
        return lambda: _GrammarMask(llguidance.LLMatcher(tokenizer, grammar))


class _GrammarMask:
    """The tokens that may come next in one answer."""

    def __init__(self, matcher: "llguidance.LLMatcher") -> None:
        self._matcher = matcher

    def allowed(self) -> NDArray[np.uint32]:
        """Return a bit for each token that may come next, in words of 32."""
        return np.frombuffer(self._matcher.compute_bitmask(), np.uint32)

    def accept(self, token: int) -> None:
        """Note the next token, which is one of the allowed."""
        self._matcher.consume_token(token)


def _schema(form: Mapping[str, Any]) -> Any:
    """Return the JSON schema of a response format; None if it has none."""
    match form.get("type", "text"):
        case "text":
            return None
        case "json_object":
            return {"type": "object"}
        case "json_schema":
            described = fields.mapping(form, "json_schema")
            if not isinstance(described.get("schema"), dict):
                raise BadRequest("response_format.json_schema.schema must be an object", "response_format")
            return described["schema"]
        case kind:
            raise BadRequest(
                f"response_format.type={fields.shown(kind)} is not supported here; use text or json_schema",
                "response_format",
            )


def _chosen(tools: Sequence[Tool], choice: Any) -> Sequence[Tool]:
    """Return the tools of which one must be called."""
    name = fields.mapping(choice, "function").get("name") if isinstance(choice, dict) else None
    chosen = [tool for tool in tools if choice == "required" or tool["function"]["name"] == name]
    if not chosen:
        raise BadRequest(
            f"tool_choice={fields.shown(choice)} names no tool of the request; use auto, none, required or "
            '{"type": "function", "function": {"name": ...}}',
            "tool_choice",
        )
    return chosen


def _json(schema: Mapping[str, Any]) -> str:
    return f"start: %json {json.dumps({**schema, 'x-guidance': _SPACING})}"


def _calls(tools: Sequence[Tool], *, several: bool) -> str:
    """Return the grammar of one call of a tool, or of one or `several`, as the chat templates parse them."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                "arguments": tool["function"].get("parameters") or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    call = f"{json.dumps(hermes.OPEN)} call {json.dumps(hermes.CLOSE)}"
    return f"start: {f'({call})+' if several else call}\ncall: {_json({'anyOf': calls}).removeprefix('start: ')}"


def _guided(codec: TokenCodec, vocab_size: int) -> "llguidance.LLTokenizer":
    """Return a tokenizer in the form of llguidance."""
    import llguidance

    if isinstance(codec, NamedTokenCodec):
        return llguidance.LLTokenizer(codec.to_json(), n_vocab=vocab_size, eos_token=list(codec.eos_ids))
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Characters(codec)), eos_token=list(codec.eos_ids))


class _Characters:
    """A vocabulary in which each token is a text of its own, as llguidance reads it."""

    bos_token_id = None

    def __init__(self, codec: TokenCodec) -> None:
        texts = [codec.decode([token]) for token in range(codec.vocab_size)]
        self.eos_token_id = codec.eos_ids[0]
        self.special_token_ids = [token for token, text in enumerate(texts) if text in ("", _REPLACED)]
        self.tokens = [
            f"<{token}>".encode() if token in self.special_token_ids else text.encode()
            for token, text in enumerate(texts)
        ]
        self._codec = codec

    def __call__(self, text: str | bytes) -> list[int]:
        return self._codec.encode(text.decode() if isinstance(text, bytes) else text)
