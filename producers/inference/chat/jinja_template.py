"""Chat templates in Jinja, as found next to a checkpoint's tokenizer.

A conversation is continued from its tokens if the template only adds to what it rendered before. Tool calls and
reasoning are parsed in the format of Hermes and Qwen.
"""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from rollstream.producers.inference.chat import hermes
from rollstream.producers.inference.chat.messages import AssistantMessage, Message, SampledTurn, Tool
from rollstream.producers.inference.chat.template import TemplateRefused
from rollstream.producers.inference.token_codec import TokenCodec
from rollstream.topics.errors import ConfigurationError


class JinjaTemplate:
    """Renders conversations with a template; the tokenizer's end tokens close the model's turn."""

    markers = (hermes.OPEN, hermes.THINK, hermes.END_OF_THINK)

    def __init__(self, tokenizer: TokenCodec, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` holds the texts of bos_token and so on.

        Raises ConfigurationError for a bad template, or if jinja2 is missing.
        """
        try:
            import jinja2
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise ConfigurationError(
                "the checkpoint's chat template needs the package jinja2: pip install 'rollstream[hf]', or set "
                "inference.chat_template=plain"
            ) from error
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_refuse, strftime_now=time.strftime)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigurationError(f"the chat template is not valid: {error}; set inference.chat_template") from error
        self._errors = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError)
        self._special_tokens = dict(special_tokens)
        self._tokenizer = tokenizer
        self.stop_ids = tuple(tokenizer.eos_ids)

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Return the tokens of a whole conversation."""
        return self._tokenizer.encode(self._text(messages, tools, prompt=True))

    def extend(
        self, turn: SampledTurn, messages: Sequence[Message], known: int, tools: Sequence[Tool]
    ) -> list[int] | None:
        """Return the turn's tokens and what the template adds after the end of the answer.

        Returns None if the template renders earlier messages differently or does not close an answer with an end token.
        """
        before = self._text(messages[:known], tools, prompt=False)
        whole = self._text(messages, tools, prompt=True)
        if not whole.startswith(before):
            return None
        rendered = self._tokenizer.encode(before)
        close = next((i for i in range(len(rendered) - 1, -1, -1) if rendered[i] in self.stop_ids), None)
        tail = "" if close is None else self._tokenizer.decode(rendered[close + 1 :])
        if close is None or tail.strip():
            return None
        prompt = [*turn.prompt, *turn.sampled]
        if not turn.sampled or turn.sampled[-1] not in self.stop_ids:
            prompt.append(rendered[close])
        return [*prompt, *self._tokenizer.encode(tail + whole[len(before) :])]

    def parse(self, turn: SampledTurn, *, text: str | None = None, complete: bool = True) -> AssistantMessage:
        """Return the content, reasoning and tool calls of the answer."""
        opened = self._tokenizer.decode(turn.prompt[-8:]).rstrip().endswith(hermes.THINK)
        text = self._tokenizer.decode(turn.sampled) if text is None else text
        return hermes.parse_with_reasoning(text, opened=opened, complete=complete)

    def _text(self, messages: Sequence[Message], tools: Sequence[Tool], *, prompt: bool) -> str:
        try:
            return self._template.render(
                messages=[_with_objects(message) for message in messages],
                tools=list(tools) or None,
                add_generation_prompt=prompt,
                **self._special_tokens,
            )
        except self._errors as error:
            raise TemplateRefused(f"the chat template refuses the conversation: {error}") from error


def _with_objects(message: Message) -> Message:
    """Return a message whose tool calls have their arguments as objects, which templates write as JSON."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [{**call, "function": _with_object(call["function"])} for call in calls]}


def _with_object(function: Mapping[str, Any]) -> dict[str, Any]:
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return dict(function)
    return {**function, "arguments": arguments}


def _to_json(value: Any, indent: int | None = None, **_options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise TemplateRefused(message)
