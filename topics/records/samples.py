"""Records of `samples`: what a trainer's TransferQueue holds."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SampleField:
    """One field of one sample; `shape` and `dtype` describe a tensor."""

    partition_id: str
    sample: str
    field: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    data: bytes
    tags: str = "{}"


@dataclass(frozen=True, kw_only=True)
class SamplesCleared:
    """Samples that were cleared."""

    partition_id: str
    samples: tuple[str, ...]
