"""vLLM's interface of tokens in, tokens out: POST /inference/v1/generate."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollstream.producers.inference.dialects import fields, sampling_parameters
from rollstream.producers.inference.dialects.answer_frame import AnswerHeader, metadata, usage
from rollstream.producers.inference.dialects.answer_stream import StreamedPart
from rollstream.producers.inference.dialects.dialect import Dialect
from rollstream.producers.inference.dialects.sampled_choices import SampledChoice
from rollstream.producers.inference.dialects.sampling_parameters import SamplingRequest

_OFF: dict[str, tuple[Any, ...]] = {
    "features": ({},), "content_parts": ([],), "output_mode": ("tokens",), "kv_transfer_params": ({},),
}  # fmt: skip
_READ = {"token_ids", "sampling_params", "stream", "stream_options"}
_PARAMETERS = {*sampling_parameters.READ, "max_tokens", "logprobs", "output_kind"}


@dataclass(frozen=True, kw_only=True)
class TokenRequest:
    """A valid request."""

    sampling: SamplingRequest
    request_id: str
    logprobs: bool
    stream: bool
    include_usage: bool


class TokenGeneration(Dialect[TokenRequest]):
    """The dialect of vLLM's generate endpoint."""

    prefix = "generate"
    stream_kind = "generate.chunk"

    def parse(self, body: Mapping[str, Any], session: str) -> TokenRequest:
        """Parse a body whose prompt is token ids. Without max_tokens an answer may fill the context."""
        sampling_parameters.check_names(body, _READ, _OFF)
        params = fields.mapping(body, "sampling_params")
        sampling_parameters.check_names(params, _PARAMETERS)
        prompt = fields.token_ids(body.get("token_ids"), "token_ids", self.limits.vocab_size)
        sampling_parameters.check_prompt(prompt, "token_ids", self.limits)
        request_id = body.get("request_id")
        return TokenRequest(
            sampling=SamplingRequest(
                prompts=[prompt],
                parameters=sampling_parameters.parse_parameters(params, self.limits),
                max_tokens=sampling_parameters.answer_limit(params, "max_tokens", len(prompt), self.limits),
            ),
            request_id=request_id if isinstance(request_id, str) else "",
            logprobs=fields.integer(params, "logprobs", -1, least=0) >= 0,
            stream=fields.flag(body, "stream"),
            include_usage=fields.flag(fields.mapping(body, "stream_options"), "include_usage"),
        )

    def answer(self, request: TokenRequest, choices: Sequence[SampledChoice], header: AnswerHeader) -> dict[str, Any]:
        """Return token ids and their logprobs; finish_reason is never tool_calls."""
        return {
            **self._head(request, header),
            "prompt_token_ids": list(request.sampling.prompts[0]),
            "output_mode": "tokens",
            "choices": [self._choice(request, choice, 0) for choice in choices],
            **metadata(choices),
            "usage": usage(request.sampling, choices),
        }

    def part(self, request: TokenRequest, part: StreamedPart, header: AnswerHeader) -> dict[str, Any]:
        """Return the new part of one choice."""
        return {
            **self._head(request, header),
            **({"prompt_token_ids": list(part.choice.prompt)} if part.first else {}),
            "choices": [self._choice(request, part.choice, part.start)],
            **(metadata([part.choice]) if part.last else {}),
        }

    def _head(self, request: TokenRequest, header: AnswerHeader) -> dict[str, Any]:
        identifier = request.request_id or header.identifier
        return {**header.fields(self.stream_kind), "id": identifier, "request_id": identifier}

    def _choice(self, request: TokenRequest, choice: SampledChoice, start: int) -> dict[str, Any]:
        return {
            "index": choice.index,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": list(choice.tokens[start:]),
            "logprobs": {
                # vLLM names a token in token_id; clients of older versions expect it in token.
                "content": [
                    {"token": f"token_id:{token}", "token_id": token, "logprob": float(logprob), "top_logprobs": []}
                    for token, logprob in zip(choice.tokens[start:], choice.logprobs[start:], strict=True)
                ]
            }
            if request.logprobs
            else None,
            **(choice.version_fields if choice.finish_reason is not None else {}),
        }
