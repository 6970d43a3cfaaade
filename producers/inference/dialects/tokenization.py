"""vLLM's /tokenize and /detokenize: texts and chats as token ids, and token ids as text."""

from collections.abc import Mapping
from typing import Any

from rollstream.producers.inference.dialects import fields, sampling_parameters
from rollstream.producers.inference.dialects.chat_completions import ChatCompletions
from rollstream.producers.inference.dialects.chat_messages import parse_messages, parse_tools
from rollstream.producers.inference.dialects.refusals import BadRequest
from rollstream.producers.inference.dialects.sampled_choices import encode
from rollstream.producers.inference.dialects.sampling_parameters import RequestLimits
from rollstream.producers.inference.token_codec import TokenCodec

_READ = {"prompt", "messages"}
_CHAT_READ = _READ | {"tools", "tool_choice", "add_generation_prompt"}
_OFF: dict[str, tuple[Any, ...]] = {"add_special_tokens": (False,), "return_token_strs": (False,)}
_CHAT_OFF: dict[str, tuple[Any, ...]] = {
    **_OFF, "continue_final_message": (False,), "chat_template": ("",), "chat_template_kwargs": ({},),
    "media_io_kwargs": ({},), "mm_processor_kwargs": ({},),
}  # fmt: skip
"""Fields of vLLM that are accepted only at the values that turn them off."""


class Tokenization:
    """Encodes as the other endpoints do. A chat is always rendered as a whole."""

    def __init__(self, tokenizer: TokenCodec, limits: RequestLimits, chat: ChatCompletions) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._chat = chat

    def tokens(self, body: Mapping[str, Any]) -> list[int]:
        """Return the token ids of `prompt`, or of the conversation in `messages`. Raises BadRequest."""
        if body.get("messages") is not None:
            sampling_parameters.check_names(body, _CHAT_READ, _CHAT_OFF)
            if body.get("prompt") is not None:
                raise BadRequest("give either prompt or messages", "prompt")
            return self._chat.rendered(
                parse_messages(body["messages"]),
                parse_tools(body.get("tools"), body.get("tool_choice")),
                generation_prompt=body.get("add_generation_prompt") is None
                or fields.flag(body, "add_generation_prompt"),
            )
        sampling_parameters.check_names(body, _READ, _OFF)
        text = body.get("prompt")
        if not isinstance(text, str):
            raise BadRequest("prompt must be a string", "prompt")
        return encode(text, self._tokenizer)

    def text(self, body: Mapping[str, Any]) -> str:
        """Return the text of `tokens`. Raises BadRequest."""
        if body.get("tokens") is None:
            raise BadRequest("tokens must be a list of token ids", "tokens")
        return self._tokenizer.decode(fields.token_ids(body["tokens"], "tokens", self._limits.vocab_size))
