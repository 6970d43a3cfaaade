"""Settings of the role that keeps third-party inference engines on the newest policy version."""

from dataclasses import dataclass
from typing import Literal

from rollstream.topics.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """Third-party inference engines, such as vLLM and SGLang, that follow the run's policy versions."""

    urls: tuple[str, ...] = ()
    """Base URLs of the engines to update, e.g. http://host:8000; `rollstream run` updates them if there are any."""
    engine: str = "vllm"
    """Kind of the engines: vllm, sglang, vllm-lora (a vLLM that loads only adapters), vllm-plugin (a vLLM that fetches
    versions itself, through our plug-in), or your own class, package.module:Class or path/to/file.py:Class."""
    python: str = ""
    """Python of an environment in which vLLM is installed: `rollstream run` then starts a vLLM there, at the first of
    `urls` or a free port of this machine, and its workers sample from it; empty: `rollstream run` starts no engine."""
    flags: tuple[str, ...] = ()
    """Further flags of `vllm serve` for the vLLM that is started."""
    api_key: str = ""
    """Bearer token of requests to the engines, as a reference: env:NAME or file:PATH; empty: no token."""
    directory: str = ""
    """Directory of the checkpoints, which every engine reads at the same path; empty: `serving` in the run's
    directory."""
    template: str = ""
    """Directory of a checkpoint of the same model, for parameters that your own trainer published under Hugging Face's
    names: its config.json and tokenizer are copied. Empty: the manifest names the model."""
    dtype: Literal["", "float32", "bfloat16", "float16"] = ""
    """Dtype of the parameters in the checkpoints; empty: as published."""
    keep_versions: int = 2
    """Number of newest checkpoints that are kept, in addition to those in use and the newest that each engine has
    loaded."""
    request_timeout_s: float = 60.0
    """Longest wait for an engine to pause, to resume or to name its version."""
    load_timeout_s: float = 600.0
    """Longest wait for an engine to load a checkpoint."""
    attempts: int = 3
    """Number of attempts to load a version into an engine that samples with another version; after them the engine
    waits for the next version. For other engines the attempts have no limit."""
    retry_s: float = 5.0
    """Pause before another attempt, and the interval at which engines are asked for their version. Both are doubled up
    to four times while an engine stays drained, can fetch no version, or reports another label than it was given."""
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
                raise ConfigurationError(f"serving.urls contains {url!r}; an engine's URL is like http://host:8000")
