"""Loads policy versions from the log: fetches a chain, applies it, and checks the result against its manifest."""

import threading
from collections.abc import Collection, Mapping
from typing import Any

from numpy.typing import NDArray

from rollstream.consumers.reused_memory import ReusedMemory
from rollstream.consumers.weights.chains import links
from rollstream.consumers.weights.content import Arrays
from rollstream.consumers.weights.fetcher import ChunkFetcher
from rollstream.consumers.weights.layout import ContentBuffer
from rollstream.topics.records import PolicyManifest


def load_version(
    fetcher: ChunkFetcher,
    manifests: Mapping[int, PolicyManifest],
    version: int,
    *,
    held: tuple[int, Arrays] = (-1, {}),
    refused: Collection[int] = (),
    timeout_s: float = 60.0,
    stop: threading.Event | None = None,
    memory: ReusedMemory | None = None,
) -> dict[str, NDArray[Any]]:
    """Return the arrays of a version. If deltas lead to it from the version `held`, only these deltas are fetched.

    Nothing is fetched if a version that it builds on is `refused`, because the digests would mismatch again.
    `timeout_s` and `stop` apply to each version of the chain. A caller that loads one version after another passes the
    same `memory` each time, so that the memory of earlier versions is used again. Raises ChainBroken,
    ChunksGone, ChunksLate or WeightsRefused.
    """
    memory = memory or ReusedMemory(0)
    arrays: dict[str, NDArray[Any]] = dict(held[1])
    for link in links(manifests, version, held[0], refused):
        # The digests of the last version also prove the versions that it builds on.
        buffer = ContentBuffer(link, checked=link.version == version, memory=memory)
        fetcher.stream(link, buffer.put, timeout_s=timeout_s, stop=stop)
        arrays = buffer.arrays(arrays)
    return arrays
