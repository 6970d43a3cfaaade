"""OpenAI's completions with the token ids of vLLM and SGLang: POST /v1/completions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from rollstream.producers.inference.dialects import fields, sampling_parameters
from rollstream.producers.inference.dialects.dialect import AnswerHeader, Dialect, StreamedPart, metadata, usage
from rollstream.producers.inference.dialects.fields import BadRequest
from rollstream.producers.inference.dialects.sampled_choices import SampledChoice, encode
from rollstream.producers.inference.dialects.sampling_parameters import SamplingRequest

DEFAULT_MAX_TOKENS = 16
_OFF = {**sampling_parameters.OFF, "echo": (False,), "suffix": ("",)}
_READ = {
    *sampling_parameters.READ, "prompt", "best_of", "max_tokens", "logprobs", "stream", "stream_options",
    "return_tokens_as_token_ids",
}  # fmt: skip
_PROMPT_FORMS = "prompt must be a string, a list of token ids, or a list of either"


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """A valid request."""

    sampling: SamplingRequest
    logprobs: bool
    tokens_as_ids: bool
    """Whether tokens are named token_id:N instead of by their text."""
    stream: bool
    include_usage: bool


class Completions(Dialect[CompletionRequest]):
    """The dialect of OpenAI's completions."""

    prefix = "cmpl"
    stream_kind = "text_completion"

    def parse(self, body: Mapping[str, Any], session: str) -> CompletionRequest:
        """Parse a body; a prompt may be text or token ids."""
        sampling_parameters.check_names(body, _READ, _OFF)
        parameters = sampling_parameters.parse_parameters(body, self.limits)
        best_of = fields.integer(body, "best_of", parameters.n, least=1)
        if best_of != parameters.n:
            raise BadRequest(
                f"best_of={fields.shown(best_of)} is not supported here; leave it out, or set it to n", "best_of"
            )
        logprobs = fields.integer(body, "logprobs", -1, least=0)
        if logprobs > 1:
            raise BadRequest(
                f"logprobs={fields.shown(logprobs)}: only the sampled token's logprob is known; ask for 1", "logprobs"
            )
        prompts = self._prompts(body.get("prompt"))
        if len(prompts) * parameters.n > self.limits.max_rows:
            raise BadRequest(
                f"{len(prompts)} prompts times n={parameters.n} is more than {self.limits.max_rows} sequences", "n"
            )
        max_tokens = sampling_parameters.answer_limit(
            body, "max_tokens", max(map(len, prompts)), self.limits, default=DEFAULT_MAX_TOKENS
        )
        return CompletionRequest(
            sampling=SamplingRequest(prompts=prompts, parameters=parameters, max_tokens=max_tokens),
            logprobs=logprobs >= 0,
            tokens_as_ids=fields.flag(body, "return_tokens_as_token_ids"),
            stream=fields.flag(body, "stream"),
            include_usage=fields.flag(fields.mapping(body, "stream_options"), "include_usage"),
        )

    def answer(
        self, request: CompletionRequest, choices: Sequence[SampledChoice], header: AnswerHeader
    ) -> dict[str, Any]:
        """Return a text_completion."""
        return {
            **header.fields("text_completion"),
            "choices": [
                {
                    **self._choice(choice, choice.text),
                    "logprobs": self._logprobs(request, choice.tokens, choice.logprobs, 0),
                    "token_ids": list(choice.tokens),
                    "prompt_token_ids": list(choice.prompt),
                    **choice.version_fields,
                    **choice.replay_fields,
                }
                for choice in choices
            ],
            **metadata(choices),
            "usage": usage(request.sampling, choices),
        }

    def part(self, request: CompletionRequest, part: StreamedPart, header: AnswerHeader) -> dict[str, Any]:
        """Return a text_completion with the new part of a choice."""
        choice = part.choice
        return {
            **header.fields(self.stream_kind),
            "choices": [
                {
                    **self._choice(choice, part.text),
                    "logprobs": self._logprobs(request, part.tokens, part.logprobs, part.characters),
                    "token_ids": list(part.tokens),
                    **({"prompt_token_ids": list(choice.prompt)} if part.first else {}),
                    **(choice.version_fields if part.last else {}),
                }
            ],
            **(metadata([choice]) if part.last else {}),
        }

    def _choice(self, choice: SampledChoice, text: str) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": text,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def token_characters(self, request: CompletionRequest, tokens: Sequence[int]) -> int:
        """Return the number of characters that `text_offset` counts; 0 if no logprobs are asked for."""
        return sum(map(len, self._texts(tokens))) if request.logprobs else 0

    def _texts(self, tokens: Sequence[int]) -> list[str]:
        return [self.tokenizer.decode([token]) for token in tokens]

    def _logprobs(
        self, request: CompletionRequest, tokens: Sequence[int], logprobs: Sequence[float], characters: int
    ) -> dict[str, Any] | None:
        """Return the logprobs of tokens; text_offset counts characters from the answer's first token, of which
        `characters` are before these tokens."""
        if not request.logprobs:
            return None
        texts = self._texts(tokens)
        return {
            "tokens": [f"token_id:{token}" for token in tokens] if request.tokens_as_ids else texts,
            "token_logprobs": [float(logprob) for logprob in logprobs],
            "top_logprobs": None,
            "text_offset": list(accumulate(map(len, texts), initial=characters))[:-1],
        }

    def _prompts(self, value: Any) -> list[list[int]]:
        if isinstance(value, str) or (isinstance(value, list) and value and all(map(fields.is_integer, value))):
            value = [value]
        if not isinstance(value, list) or not value:
            raise BadRequest(_PROMPT_FORMS, "prompt")
        prompts = []
        for prompt in value:
            if isinstance(prompt, str):
                tokens = encode(prompt, self.tokenizer)
            elif isinstance(prompt, list) and all(map(fields.is_integer, prompt)):
                tokens = prompt
            else:
                raise BadRequest(_PROMPT_FORMS, "prompt")
            sampling_parameters.check_prompt(tokens, "prompt", self.limits)
            prompts.append(tokens)
        return prompts
