"""The fields around the choices of an answer, in both dialects: names, time, policy version, and usage."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollstream.producers.inference.dialects.sampled_choices import SampledChoice
from rollstream.producers.inference.dialects.sampling_parameters import SamplingRequest


@dataclass(frozen=True, kw_only=True)
class AnswerHeader:
    """Names and time of one answer."""

    identifier: str
    created: int
    """Seconds since the Unix epoch."""
    model: str
    replica_id: str

    def fields(self, kind: str) -> dict[str, Any]:
        """Return the first fields of an answer or of a stream's event; `kind` is OpenAI's type of object."""
        return {
            "id": self.identifier,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "replica_id": self.replica_id,
        }


def metadata(choices: Sequence[SampledChoice]) -> dict[str, Any]:
    """Return the newest policy version of the choices, also as SGLang's label; for a single choice also its spans."""
    newest = max((choice.highest_version for choice in choices), default=-1)
    spans = {"weight_versions": choices[0].version_fields["weight_versions"]} if len(choices) == 1 else {}
    return {"policy_version": newest, "metadata": {"weight_version": str(newest), **spans}}


def usage(request: SamplingRequest, choices: Sequence[SampledChoice]) -> dict[str, int]:
    """Return OpenAI's count of tokens; each prompt counts once."""
    prompt_tokens = sum(map(len, request.prompts))
    completion_tokens = sum(len(choice.tokens) for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
