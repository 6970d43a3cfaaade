"""A version in temporary files takes the memory of a few tensors."""

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from rollstream.consumers.weights.content import WeightsRefused
from rollstream.consumers.weights.fetcher import ChunkFetcher
from rollstream.consumers.weights.layout import full_content, split
from rollstream.consumers.weights.spooled_version import SpooledVersion
from rollstream.topics.records import Chunk, PolicyManifest
from rollstream.topics.wire.params_digest import params_digest, tensor_digests

TENSOR_BYTES = 1024 * 1024
PARAMS = {f"layer.{n}": np.full(TENSOR_BYTES // 4, n, np.float32) for n in range(16)}
CONTENT = full_content(PARAMS, tensor_digests(PARAMS))
PIECES = list(split(CONTENT.views, TENSOR_BYTES))
MANIFEST = PolicyManifest(
    version=0,
    learner="l",
    step=0,
    epoch="e",
    tensors=CONTENT.tensors,
    chunks=tuple(
        Chunk(index=n, partition=0, offset=n, size_bytes=len(piece), digest="") for n, piece in enumerate(PIECES)
    ),
    digest=params_digest(PARAMS),
)


class Arrived:
    """Gives chunks that are already there, instead of fetching them."""

    def stream(self, manifest: PolicyManifest, take: Callable[[Chunk, bytes], object], *, timeout_s: float) -> None:
        for chunk in manifest.chunks:
            take(chunk, PIECES[chunk.index])


def spooled(manifest: PolicyManifest, directory: Path) -> SpooledVersion:
    return SpooledVersion(cast(ChunkFetcher, Arrived()), {0: manifest}, 0, directory)


def test_a_version_is_checked_in_the_memory_of_a_few_tensors(tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        with spooled(MANIFEST, tmp_path) as version:
            _size, peak = tracemalloc.get_traced_memory()
            assert np.asarray(version.tensors["layer.7"]).max() == 7
    finally:
        tracemalloc.stop()
    assert peak < 4 * TENSOR_BYTES


def test_a_version_is_refused_if_a_tensor_or_the_whole_differs(tmp_path: Path) -> None:
    first, *others = MANIFEST.tensors
    wrong = replace(MANIFEST, tensors=(replace(first, digest="0" * 64), *others))
    with pytest.raises(WeightsRefused, match=r"tensor layer\.0 of policy version 0 differs"):
        spooled(wrong, tmp_path)
    with pytest.raises(WeightsRefused, match="version 0 as a whole differs"):
        spooled(replace(MANIFEST, digest="0" * 64), tmp_path)
