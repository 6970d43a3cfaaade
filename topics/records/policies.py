"""Records of `policies`: manifests of policy versions."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One tensor of a policy version and the place of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size_bytes: int
    digest: str
    changed: int = -1


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One chunk of a policy version's bytes and its place in `weights`, or the file that holds it."""

    index: int
    partition: int
    offset: int
    size_bytes: int
    digest: str
    codec: str = ""
    content_bytes: int = -1
    url: str = ""


@dataclass(frozen=True, kw_only=True)
class PolicyManifest:
    """The commit point of a policy version."""

    version: int
    learner: str
    step: int
    epoch: str
    tensors: tuple[Tensor, ...]
    chunks: tuple[Chunk, ...]
    digest: str
    kind: Literal["full", "delta", "external"] = "full"
    base: int = -1
    model: str = "{}"
    created: float = 0.0
    params_digest: str = ""
    dtype: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
