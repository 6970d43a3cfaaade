"""Chat templates in Jinja, as found next to a checkpoint's tokenizer, rendered as transformers renders them.

A conversation is continued from its tokens if the template only adds to what it rendered before. Tool calls and
reasoning are parsed in the format of Hermes and Qwen.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn, Self

from rollstream.producers.inference.chat import hermes
from rollstream.producers.inference.chat.template import AssistantMessage, Message, SampledTurn, TemplateRefused, Tool
from rollstream.producers.inference.token_codec import TokenCodec
from rollstream.topics.errors import ConfigurationError

if TYPE_CHECKING:
    import jinja2

DEFAULT, FOR_TOOLS = "default", "tool_use"
"""Names of the templates of a checkpoint that has several, as in transformers."""
_OWN_VARIABLES = {"messages", "tools", "add_generation_prompt"}


class JinjaTemplate:
    """Renders conversations with a template; the tokenizer's end tokens close the model's turn."""

    markers = (hermes.OPEN, hermes.THINK, hermes.END_OF_THINK)

    def __init__(self, tokenizer: TokenCodec, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """`sources` holds the template DEFAULT, and FOR_TOOLS if requests with tools have another one;
        `special_tokens` holds the texts of bos_token and so on.

        Raises ConfigurationError for a bad template, or if jinja2 is missing.
        """
        try:
            import jinja2
        except ImportError as error:
            raise ConfigurationError(
                "the checkpoint's chat template needs the package jinja2: pip install 'rollstream[hf]', or set "
                "inference.chat_template=plain"
            ) from error
        environment = _environment()
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        except jinja2.TemplateError as error:
            raise ConfigurationError(f"the chat template is not valid: {error}; set inference.chat_template") from error
        self._undefined = jinja2.UndefinedError
        self._errors = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError)
        self._variables: Mapping[str, Any] = special_tokens
        self._tokenizer = tokenizer
        self.stop_ids = tuple(tokenizer.eos_ids)

    def with_variables(self, variables: Mapping[str, Any]) -> Self:
        """Return this template with further variables. As in transformers, they replace special tokens, and one that
        the template does not use has no effect."""
        if own := _OWN_VARIABLES & variables.keys():
            raise TemplateRefused(f"{min(own)} is no variable to set; leave it out")
        template = copy.copy(self)
        template._variables = {**self._variables, **variables}
        return template

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
        shown = [_for_template(message) for message in messages]
        try:
            try:
                return self._rendered(shown, tools, prompt)
            except self._undefined:
                # Some templates join the content of every message with text.
                return self._rendered([{"content": "", **message} for message in shown], tools, prompt)
        except self._errors as error:
            raise TemplateRefused(f"the chat template refuses the conversation: {error}") from error

    def _rendered(self, messages: list[Message], tools: Sequence[Tool], prompt: bool) -> str:
        template = self._templates.get(FOR_TOOLS if tools else DEFAULT, self._templates[DEFAULT])
        own = {"messages": messages, "tools": list(tools) or None, "add_generation_prompt": prompt}
        return template.render({"documents": None, **self._variables, **own})


class _Arguments(dict[str, Any]):
    """Arguments of a call, as an object that a template writes as JSON; one that joins them with text gets their text,
    as in OpenAI's protocol."""

    def __init__(self, arguments: Mapping[str, Any], text: str) -> None:
        super().__init__(arguments)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, after: str) -> str:
        return self._text + after

    def __radd__(self, before: str) -> str:
        return before + self._text


def _for_template(message: Message) -> Message:
    """Return a message in the form of transformers: reasoning under both of its names, and no empty content beside tool
    calls, because transformers leaves out what is null."""
    message = dict(message)
    if reasoning := message.get("reasoning_content"):
        message["thinking"] = reasoning
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [{**call, "function": _with_object(call["function"])} for call in calls]
        if not message["content"]:
            del message["content"]
    return message


def _with_object(function: Mapping[str, Any]) -> dict[str, Any]:
    text = function["arguments"]
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return dict(function)
    return {**function, "arguments": _Arguments(arguments, text) if isinstance(arguments, dict) else arguments}


def _environment() -> "jinja2.Environment":
    """Return the environment of transformers' chat templates: its sandbox, tags, filters and functions."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """The tag around what a model generates; it only marks, and opens a scope."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.tests["none"] = _is_none
    environment.globals.update(raise_exception=_refuse, strftime_now=lambda form: datetime.now().strftime(form))
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _is_none(value: Any) -> bool:
    """Whether a value is none. Absent content is, too: templates written before transformers left it out test it so,
    and would lose the tool calls of the message."""
    return value is None or getattr(value, "_undefined_name", None) == "content"


def _refuse(message: str) -> NoReturn:
    raise TemplateRefused(message)
