"""SGLang's interface of tokens in, tokens out: POST /generate. Not streamed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollstream.producers.inference.dialects import fields, sampling_parameters
from rollstream.producers.inference.dialects.answer_frame import AnswerHeader
from rollstream.producers.inference.dialects.answer_stream import StreamedPart
from rollstream.producers.inference.dialects.dialect import Dialect
from rollstream.producers.inference.dialects.refusals import BadRequest
from rollstream.producers.inference.dialects.sampled_choices import SampledChoice, encode
from rollstream.producers.inference.dialects.sampling_parameters import SamplingRequest

_OFF: dict[str, tuple[Any, ...]] = {
    "stream": (False,), "return_routed_experts": (False,), "return_hidden_states": (False,), "top_logprobs_num": (0,),
    "token_ids_logprob": ([],), "logprob_start_len": (-1,),
}  # fmt: skip
_HARMLESS = sampling_parameters.HARMLESS | {"return_text_in_logprobs", "log_metrics"}
_PARAMETERS = {*(sampling_parameters.READ - {"n"}), "n", "max_new_tokens", "sampling_seed"}


@dataclass(frozen=True, kw_only=True)
class SglangRequest:
    """A valid request."""

    sampling: SamplingRequest
    logprobs: bool
    stream: bool = False
    include_usage: bool = False


class SglangGeneration(Dialect[SglangRequest]):
    """The dialect of SGLang's generate endpoint."""

    prefix = "generate"
    stream_kind = "generate"

    def parse(self, body: Mapping[str, Any], session: str) -> SglangRequest:
        """Parse a body; a prompt is input_ids, or text. Without max_new_tokens an answer may fill the context."""
        sampling_parameters.check_names(
            body, {"input_ids", "text", "sampling_params", "return_logprob"}, _OFF, _HARMLESS
        )
        params = fields.mapping(body, "sampling_params")
        sampling_parameters.check_names(params, _PARAMETERS)
        seed = "sampling_seed" if params.get("seed") is None else "seed"
        prompt = self._prompt(body)
        return SglangRequest(
            sampling=SamplingRequest(
                prompts=[prompt],
                parameters=sampling_parameters.parse_parameters({**params, "seed": params.get(seed)}, self.limits),
                max_tokens=sampling_parameters.answer_limit(params, "max_new_tokens", len(prompt), self.limits),
            ),
            logprobs=fields.flag(body, "return_logprob"),
        )

    def answer(self, request: SglangRequest, choices: Sequence[SampledChoice], header: AnswerHeader) -> Any:
        """Return an object, or a list of objects for n above 1."""
        answers = [self._object(request, choice, header) for choice in choices]
        return answers[0] if len(answers) == 1 else answers

    def part(self, request: SglangRequest, part: StreamedPart, header: AnswerHeader) -> dict[str, Any]:
        """Raise NotImplementedError, because requests for streams are refused."""
        raise NotImplementedError

    def _object(self, request: SglangRequest, choice: SampledChoice, header: AnswerHeader) -> dict[str, Any]:
        ending: dict[str, Any] = {"type": choice.finish_reason}
        if choice.finish_reason == "length":
            ending["length"] = len(choice.tokens)
        elif choice.stop_reason is not None:
            ending["matched"] = choice.stop_reason
        meta: dict[str, Any] = {
            "id": header.identifier,
            "finish_reason": ending,
            "prompt_tokens": len(choice.prompt),
            "completion_tokens": len(choice.tokens),
            "cached_tokens": 0,
            "replica_id": header.replica_id,
            "weight_version": str(choice.highest_version),
            "weight_versions": choice.version_fields["weight_versions"],
        }
        if request.logprobs:
            pairs = zip(choice.logprobs, choice.tokens, strict=True)
            meta["output_token_logprobs"] = [[float(logprob), token, None] for logprob, token in pairs]
        return {
            "text": choice.text,
            "output_ids": list(choice.tokens),
            "prompt_token_ids": list(choice.prompt),
            "meta_info": meta,
            "policy_version": choice.highest_version,
        }

    def _prompt(self, body: Mapping[str, Any]) -> list[int]:
        text = body.get("text")
        if (text is None) == (body.get("input_ids") is None):
            raise BadRequest("give either input_ids or text", "input_ids")
        if text is not None:
            if not isinstance(text, str):
                raise BadRequest("text must be a string", "text")
            name, prompt = "text", encode(text, self.tokenizer, "text")
        else:
            name, prompt = "input_ids", fields.token_ids(body["input_ids"], "input_ids", self.limits.vocab_size)
        sampling_parameters.check_prompt(prompt, name, self.limits)
        return prompt
