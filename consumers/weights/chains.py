"""Chains of policy versions: a full version and the deltas after it, which `load_version` fetches and applies."""

import threading
from collections.abc import Collection, Mapping, MutableMapping
from contextlib import suppress
from typing import Any

from numpy.typing import NDArray

from rollstream.consumers.reused_memory import ReusedMemory
from rollstream.consumers.weights.content import Arrays
from rollstream.consumers.weights.fetcher import ChunkFetcher
from rollstream.consumers.weights.layout import ContentBuffer
from rollstream.topics.errors import RollstreamError
from rollstream.topics.records import PolicyManifest


class ChainBroken(RollstreamError):
    """No chain of versions on the log leads to a policy version."""


def links(
    manifests: Mapping[int, PolicyManifest], version: int, held: int = -1, refused: Collection[int] = ()
) -> list[PolicyManifest]:
    """Return the versions to fetch for `version`, in order: deltas on `held` if possible, else from a full version on.

    Raises ChainBroken if there is no such chain, or if one of its versions is `refused`.
    """
    chain: list[PolicyManifest] = []
    wanted = version
    while True:
        manifest = manifests.get(wanted)
        if manifest is None or manifest.kind == "external" or (chain and wanted >= chain[-1].version):
            raise ChainBroken(f"the weights of version {wanted}, for policy version {version}, are not on the log")
        if wanted in refused:
            raise ChainBroken(f"policy version {version} builds on version {wanted}, which was refused")
        chain.append(manifest)
        if manifest.kind == "full" or manifest.base == held >= 0:
            return chain[::-1]
        wanted = manifest.base


def lost(manifests: Mapping[int, PolicyManifest], versions: Collection[int], incomplete: Collection[int]) -> set[int]:
    """Return those of `versions` that nobody can fetch, if no later one can be fetched either.

    `incomplete` are versions of which chunks are missing. External versions are not lost.
    """
    gone = set[int]()
    for version in sorted(versions, reverse=True):
        if manifests[version].kind == "external":
            continue
        try:
            links(manifests, version, refused=incomplete)
            break
        except ChainBroken:
            gone.add(version)
    return gone


def needed(manifests: Mapping[int, PolicyManifest], versions: int) -> set[int]:
    """Return the newest `versions` versions and all versions that they build on."""
    return with_bases(manifests, *sorted(manifests)[-versions:])


def with_bases(manifests: Mapping[int, PolicyManifest], *versions: int) -> set[int]:
    """Return versions and all versions that they build on; only the version itself if no chain leads to it."""
    kept = set[int]()
    for version in sorted(versions, reverse=True):
        if version in kept:
            continue
        kept.add(version)
        with suppress(ChainBroken):
            kept.update(link.version for link in links(manifests, version))
    return kept


def forget(manifests: MutableMapping[int, PolicyManifest], oldest: int) -> None:
    """Remove the versions before the newest full version that is not above `oldest`. Neither `oldest` nor later
    versions build on them."""
    anchor = max((v for v, manifest in manifests.items() if v <= oldest and manifest.kind == "full"), default=-1)
    for version in [version for version in manifests if version < anchor]:
        del manifests[version]


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
