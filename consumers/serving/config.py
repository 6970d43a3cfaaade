"""Settings of the role that keeps inference engines of others on the newest policy version."""

from dataclasses import dataclass
from typing import Literal

from rollstream.topics.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """Inference engines of others, such as vLLM and SGLang, that follow the run's policy versions."""

    urls: tuple[str, ...] = ()
    """Base URLs of the engines to update, e.g. http://host:8000; `rollstream run` updates them if there are any."""
    engine: str = "vllm"
    """Kind of the engines: vllm, sglang, vllm-lora (a vLLM that is given adapters alone), vllm-plugin (a vLLM that
    fetches versions itself, by our plug-in), or a class of your own, package.module:Class or path/to/file.py:Class."""
    python: str = ""
    """Python of an environment in which vLLM is installed: `rollstream run` then starts a vLLM there, at the first of
    `urls` or a free port of this machine, and its workers ask that one; empty: engines run by themselves."""
    flags: tuple[str, ...] = ()
    """Further flags of the vLLM that is started, as for `vllm serve`."""
    api_key: str = ""
    """Bearer token of requests to the engines, as a reference: env:NAME or file:PATH; none if empty."""
    directory: str = ""
    """Directory of the checkpoints, which every engine reads at the same path; serving in the run's directory if
    empty."""
    template: str = ""
    """Directory of a checkpoint of the same model, for parameters that a trainer of your own published under Hugging
    Face's names: its config.json and tokenizer are copied. Empty: the model is that of the manifest."""
    dtype: Literal["", "float32", "bfloat16", "float16"] = ""
    """Dtype of the parameters in the checkpoints; empty: as published."""
    keep_versions: int = 2
    """Newest checkpoints that are kept; the one that failed updates fall back to is kept beside them."""
    request_timeout_s: float = 60.0
    """Longest wait for an engine to pause, to resume or to name its version."""
    load_timeout_s: float = 600.0
    """Longest wait for an engine to load a checkpoint."""
    attempts: int = 3
    """How often one version is loaded into an engine before the next version is awaited."""
    retry_s: float = 5.0
    """Pause before another attempt, and the interval at which engines are asked for their version."""
    metrics_interval_s: float = 5.0
    """Time between two records of this role on the metrics topic; 0 writes none."""

    def __post_init__(self) -> None:
        for name in ("keep_versions", "attempts"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"serving.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("request_timeout_s", "load_timeout_s", "retry_s"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"serving.{name} is {getattr(self, name)}; it must be above 0")
        if not self.metrics_interval_s >= 0:
            raise ConfigurationError(
                f"serving.metrics_interval_s is {self.metrics_interval_s}; it must be at least 0 (0: none)"
            )
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ConfigurationError(f"serving.urls holds {url!r}; an engine's URL is like http://host:8000")
