"""Sampling parameters that the dialects have in common. A parameter that changes how tokens are drawn is never ignored:
it is honoured, or refused in an error that names it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollstream.producers.inference.decoding import TokenMask
from rollstream.producers.inference.dialects import fields
from rollstream.producers.inference.dialects.fields import CONTEXT_TOO_LONG, BadRequest

MAX_STOPS = 4
MAX_STOP_TOKENS = 32
OFF: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "prompt_logprobs": (0,),
    "truncate_prompt_tokens": (-1,),
}
"""Parameters accepted only at the values that turn them off."""
HARMLESS = {
    "model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "request_id",
    "session_id", "cache_salt", "priority", "return_token_ids", "skip_special_tokens", "detokenize",
    "spaces_between_special_tokens",
}  # fmt: skip
"""Fields that do not change how tokens are drawn. They are accepted, most of them without effect."""
READ = {
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "return_routed_experts",
    "return_sampling_mask",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Limits on the requests that a server accepts."""

    max_model_len: int
    """Maximum number of tokens in a prompt and its answer together."""
    max_rows: int
    """Maximum number of sequences in one request."""
    vocab_size: int
    """Number of token ids that the model knows, at least as many as the tokenizer's."""
    truncated_sampling: bool
    """Whether top_p, top_k and min_p are allowed without return_sampling_mask."""


@dataclass(frozen=True, kw_only=True)
class SamplingParameters:
    """How the answers to one prompt are drawn, and what ends them."""

    n: int
    temperature: float
    top_p: float
    top_k: int
    """0 turns it off."""
    min_p: float
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    routed_experts: bool = False
    """Whether a whole answer is to name the experts of each token; streams never do."""
    sampling_mask: bool = False
    """Whether a whole answer is to name the tokens that the filters kept."""


@dataclass(frozen=True, kw_only=True)
class SamplingRequest:
    """Prompts, and how to sample after them."""

    prompts: Sequence[Sequence[int]]
    parameters: SamplingParameters
    max_tokens: int
    constraint: Callable[[], TokenMask] | None = None
    """Begins the constraint on the form of each answer."""

    @property
    def row_prompts(self) -> list[Sequence[int]]:
        """One prompt per choice, in the order of the choices: n times the first prompt, n times the second, ..."""
        return [prompt for prompt in self.prompts for _ in range(self.parameters.n)]


def check_names(
    body: Mapping[str, Any], read: set[str], off: Mapping[str, tuple[Any, ...]] = OFF, harmless: set[str] = HARMLESS
) -> None:
    """Raise BadRequest for an unknown field, or for an unsupported field whose value does not turn it off; null is as
    good as absent."""
    for name, value in body.items():
        if value is None or name in read or name in harmless:
            continue
        if name not in off:
            raise BadRequest(f"unrecognized request argument supplied: {fields.shown(name)}", name)
        if value not in off[name]:
            raise BadRequest(
                f"{name}={fields.shown(value)} is not supported here; leave it out, or set it to {off[name][0]!r}", name
            )


def parse_parameters(
    body: Mapping[str, Any], limits: RequestLimits, *, stop_token_ids: frozenset[int] = frozenset()
) -> SamplingParameters:
    """Return the common parameters of a body that `check_names` has accepted. Raises BadRequest, naming the parameter.

    `stop_token_ids` end every answer, in addition to the request's own stop tokens.
    """
    n = fields.integer(body, "n", 1, least=1)
    if n > limits.max_rows:
        raise BadRequest(f"n={fields.shown(n)} is more than {limits.max_rows} sequences", "n")
    stop_ids = fields.token_ids(body.get("stop_token_ids"), "stop_token_ids", limits.vocab_size)
    if len(stop_ids) > MAX_STOP_TOKENS:
        raise BadRequest(
            f"stop_token_ids holds {len(stop_ids)} ids; at most {MAX_STOP_TOKENS} are supported", "stop_token_ids"
        )
    top_p = fields.number(body, "top_p", 1.0, least=0, most=1)
    top_k = max(0, fields.integer(body, "top_k", 0, least=-1))
    min_p = fields.number(body, "min_p", 0.0, least=0, most=1)
    sampling_mask = fields.flag(body, "return_sampling_mask")
    for name, off in (("top_p", top_p == 1), ("top_k", top_k == 0), ("min_p", min_p == 0)):
        if not off and not sampling_mask and not limits.truncated_sampling:
            raise BadRequest(
                f"{name}={fields.shown(body[name])}: a learner cannot recompute the logprobs of a truncated "
                "distribution without its sampling mask; leave it out, ask for return_sampling_mask, or set "
                "inference.truncated_sampling if no answers are trained on",
                name,
            )
    if top_p == 0:
        raise BadRequest("top_p must be above 0; for greedy sampling use temperature 0", "top_p")
    return SamplingParameters(
        n=n,
        temperature=fields.number(body, "temperature", 1.0, least=0),
        top_p=top_p,
        top_k=min(top_k, limits.vocab_size),
        min_p=min_p,
        seed=None if body.get("seed") is None else fields.integer(body, "seed", 0),
        stop=fields.strings(body, "stop", most=MAX_STOPS),
        stop_token_ids=stop_token_ids.union(stop_ids),
        routed_experts=fields.flag(body, "return_routed_experts"),
        sampling_mask=sampling_mask,
    )


def check_prompt(prompt: Sequence[int], param: str, limits: RequestLimits) -> None:
    """Raise BadRequest for an empty prompt, one with unknown ids, or one that leaves no room for an answer."""
    fields.token_ids(list(prompt), param, limits.vocab_size)
    if not 0 < len(prompt) < limits.max_model_len:
        raise BadRequest(
            f"{param} has {len(prompt)} tokens; this server accepts 1 to {limits.max_model_len - 1}: shorten it, or "
            "raise inference.max_model_len",
            param,
            code=CONTEXT_TOO_LONG if prompt else None,
        )


def answer_limit(
    body: Mapping[str, Any], name: str, prompt_tokens: int, limits: RequestLimits, *, default: int | None = None
) -> int:
    """Return the token limit of an answer: the field `name`, else `default`, but at most what the context has room
    for."""
    room = limits.max_model_len - prompt_tokens
    return min(room, fields.integer(body, name, room if default is None else default, least=1))
