"""Chat templates of the library `renderers`, which has code to render and continue chats of each model family."""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

from rollstream.producers.inference.chat.template import (
    AssistantMessage,
    Message,
    SampledTurn,
    TemplateRefused,
    Tool,
    ToolCall,
)
from rollstream.producers.inference.token_codec import NamedTokenCodec, TokenCodec
from rollstream.topics.errors import ConfigurationError


class LibraryTemplate:
    """Renders conversations with a renderer of the library, given by its name, such as qwen3."""

    markers = ()
    """Empty, because the library finds calls and reasoning by special tokens, not by parts of a text."""

    def __init__(self, tokenizer: TokenCodec, name: str) -> None:
        """Raises ConfigurationError if the library or its renderer is missing, or the tokenizer does not fit."""
        try:
            import renderers
        except ImportError as error:
            raise ConfigurationError(
                f"inference.chat_template is {name!r}, which needs the library renderers: "
                "pip install 'rollstream[chat]'"
            ) from error
        if not isinstance(tokenizer, NamedTokenCodec):
            raise ConfigurationError(
                f"inference.chat_template is {name!r}, which needs the tokenizer of a checkpoint: set "
                "learner.pretrained, or chat_template to plain"
            )
        try:
            config = renderers.config_from_name(name)
            if name == "default" or config is None:
                raise ValueError("name the renderer of the model's family, or leave the setting empty")
            # By default, a new question drops earlier reasoning, and sampled turns are rendered again without it.
            config = config.model_copy(update={"thinking_retention": "all"})
            self._create = partial(renderers.create_renderer, _LibraryTokenizer(tokenizer, name), config)
            self._renderer = self._create()
        except (ValueError, AssertionError, TypeError) as error:
            raise ConfigurationError(f"inference.chat_template is {name!r}: {error}") from error
        self._variables: Mapping[str, Any] = {}
        self.stop_ids = tuple(self._renderer.get_stop_token_ids())

    def with_variables(self, variables: Mapping[str, Any]) -> Self:
        """Return this template with the values of variables that its renderer knows."""
        template = copy.copy(self)
        with _refusals():
            template._renderer = self._create(chat_template_kwargs={**self._variables, **variables})
        template._variables = {**self._variables, **variables}
        return template

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Return the tokens of a whole conversation."""
        with _refusals():
            return list(
                self._renderer.render_ids(list(messages), tools=list(tools) or None, add_generation_prompt=True)
            )

    def extend(
        self, turn: SampledTurn, messages: Sequence[Message], known: int, tools: Sequence[Tool]
    ) -> list[int] | None:
        """Return the turn's tokens and the new messages, joined by the library; None if it cannot join them."""
        prompt, sampled = list(turn.prompt), list(turn.sampled)
        with _refusals():
            bridged = self._renderer.bridge_to_next_turn(
                prompt, sampled, list(messages[known:]), tools=list(tools) or None
            )
        if bridged is None:
            return None
        tokens = list(bridged.token_ids)
        return tokens if tokens[: len(prompt) + len(sampled)] == prompt + sampled else None

    def parse(self, turn: SampledTurn, *, text: str | None = None, complete: bool = True) -> AssistantMessage:
        """Return the content, reasoning and tool calls of the answer; a malformed call stays in the content. The
        library reads the tokens instead of `text`, so a stream decodes its answer again for each part."""
        parsed = self._renderer.parse_response(list(turn.sampled), prompt_ids=list(turn.prompt))
        calls = [call for call in parsed.tool_calls if call.status.value == "ok" and call.name]
        content = parsed.content
        if complete:
            content += "".join(call.raw for call in parsed.tool_calls if call not in calls)
        return AssistantMessage(
            content=content,
            reasoning=(parsed.reasoning_content or "").strip(),
            tool_calls=tuple(ToolCall(str(call.name), _json(call.arguments)) for call in calls),
        )


class _LibraryTokenizer:
    """A tokenizer with the interface that the library expects."""

    def __init__(self, tokenizer: NamedTokenCodec, name: str) -> None:
        self._tokenizer = tokenizer
        self.name_or_path = name
        self.unk_token_id = None
        self.eos_token_id = tokenizer.eos_ids[0]

    def encode(self, text: str, *_arguments: Any, **_options: Any) -> list[int]:
        """Token ids of a text, without special tokens added."""
        return self._tokenizer.encode(text)

    def decode(self, token_ids: Any, *_arguments: Any, **_options: Any) -> str:
        """Text of token ids."""
        return self._tokenizer.decode([token_ids] if isinstance(token_ids, int) else list(token_ids))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Ids of tokens by their text; None for a text that is not in the vocabulary."""
        if isinstance(tokens, str):
            return self._tokenizer.token_id(tokens)
        return [self._tokenizer.token_id(token) for token in tokens]


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError) as error:
        raise TemplateRefused(f"the chat template refuses the conversation: {error}") from error


def _json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
