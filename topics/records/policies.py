"""Records of `policies`: manifests of policy versions."""

from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One chunk of a policy version's bytes and its place in `weights`."""

    index: int
    partition: int
    offset: int
    size_bytes: int
    digest: str


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
