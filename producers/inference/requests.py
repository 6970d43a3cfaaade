"""Builds requests for samples in the dialect of each engine. Pure.

rollstream accepts OpenAI's completions, as does any server that supports return_token_ids. vLLM and SGLang report which
weights sampled each token only on their own routes, which accept token ids.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from rollstream.producers.inference.answers import Dialect

EngineName = Literal["rollstream", "vllm", "sglang"]
ENGINES: tuple[EngineName, ...] = ("rollstream", "vllm", "sglang")
LABEL_ROUTES: Mapping[EngineName, str] = {"vllm": "/weight_info", "sglang": "/model_info"}
"""Routes that return the label of the weights, for engines whose model lists name no version; vLLM has the route only
in development mode."""


class Filters(NamedTuple):
    """Filters by which tokens are removed from the distribution before one is drawn."""

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def active(self) -> bool:
        """Whether any filter removes tokens."""
        return self != Filters()

    @property
    def parameters(self) -> dict[str, float]:
        """Parameters of a request, without those that remove nothing."""
        return {name: value for name, value in self._asdict().items() if value != Filters._field_defaults[name]}


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """A request for `n` samples after one prompt, of text or token ids."""

    prompt: str | Sequence[int]
    n: int
    max_tokens: int
    temperature: float
    seed: int
    stop: tuple[str, ...] = ()
    session: str = ""
    """Requests of one session go to one server while it is healthy and up to date."""
    filters: Filters = Filters()  # noqa: RUF009
    """With filters, the answer is to name the tokens that they keep. vLLM names them if it was started with
    --return-sampling-mask, whatever the request says."""
    routed_experts: bool = False
    """Whether the answer is to name the experts of each token, where the server knows them. vLLM names them if it was
    started with --enable-return-routed-experts, whatever the request says."""


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """A request in the form that one engine expects."""

    path: str
    """Path below the server's root."""
    payload: Mapping[str, Any]
    dialect: Dialect


OPENAI_NEUTRAL: Mapping[str, float] = {"top_p": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
"""OpenAI's sampling parameters, at the values with which they leave the policy's distribution as it is. They are always
sent: for a parameter left out, vLLM and SGLang take the value in the checkpoint's generation_config.json."""
ENGINE_NEUTRAL: Mapping[str, float] = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""The same for the parameters that all ENGINES add to OpenAI's; any other server may refuse them as unknown."""


class ListedModels(NamedTuple):
    """Kind and version of a server, from its list of models."""

    engine: EngineName | None
    """Kind of the server; None if the list does not name it. It then gets requests like a rollstream server."""
    version: int
    """Newest policy version; -1 if the list names none."""


def listed_models(models: Mapping[str, Any]) -> ListedModels:
    """Return the kind and version in a list of models; invalid entries are ignored."""
    data = models.get("data")
    entries = [entry for entry in data if isinstance(entry, dict)] if isinstance(data, list) else []
    owners = [entry.get("owned_by") for entry in entries]
    versions = [entry.get("policy_version") for entry in entries]
    return ListedModels(
        engine=next((engine for engine in ENGINES if engine in owners), None),
        version=max((v for v in versions if isinstance(v, int) and not isinstance(v, bool)), default=-1),
    )


def takes_tokens(engine: EngineName) -> bool:
    """Whether the engine's route takes token ids only, so that a text must be tokenized first."""
    return engine != "rollstream"


def engine_request(request: SampleRequest, engine: EngineName, model: str, *, extensions: bool) -> EngineRequest:
    """Return the request to `model` in an engine's dialect. `prompt` must be token ids if the engine `takes_tokens`.
    Completions have the engines' own sampling parameters only if the server takes these `extensions`."""
    stop = {"stop": list(request.stop)} if request.stop else {}
    limits = {"n": request.n, "temperature": request.temperature, **request.filters.parameters, **stop}
    replayed = {"return_routed_experts": True} if request.routed_experts else {}
    masked = {"return_sampling_mask": True} if request.filters.active else {}
    match engine:
        case "rollstream":
            payload = {
                "model": model,
                "prompt": request.prompt,
                "max_tokens": request.max_tokens,
                "seed": request.seed,
                "logprobs": 1,
                "return_token_ids": True,
                **OPENAI_NEUTRAL,
                **({**ENGINE_NEUTRAL, **replayed, **masked} if extensions else {}),
                **limits,
            }
            return EngineRequest(path="/v1/completions", payload=payload, dialect="completions")
        case "vllm":
            payload = {
                "model": model,
                "token_ids": request.prompt,
                "sampling_params": {"max_tokens": request.max_tokens, "seed": request.seed, "logprobs": 0, **limits},
                "output_mode": "text",
                "return_token_ids": True,
            }
            return EngineRequest(path="/inference/v1/generate", payload=payload, dialect="generate")
        case "sglang":
            payload = {
                "input_ids": request.prompt,
                "sampling_params": {"max_new_tokens": request.max_tokens, **limits},
                "return_logprob": True,
                "logprob_start_len": -1,
                **replayed,
                **masked,
            }
            return EngineRequest(path="/generate", payload=payload, dialect="sglang")
