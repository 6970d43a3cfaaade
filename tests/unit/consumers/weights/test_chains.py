"""Chains of versions: which are fetched, which are kept, which are forgotten."""

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from rollstream.consumers.weights.chains import ChainBroken, SpooledVersion, forget, links, lost, needed, with_bases
from rollstream.consumers.weights.content import WeightsRefused
from rollstream.consumers.weights.fetcher import ChunkFetcher
from rollstream.consumers.weights.layout import full_content, split
from rollstream.topics.records import Chunk, PolicyManifest
from rollstream.topics.wire.params_digest import params_digest, tensor_digests


def manifests(kinds: str) -> dict[int, PolicyManifest]:
    """A version for each letter: full, delta of the one before, external."""
    return {version: manifest(version, kind) for version, kind in enumerate(kinds)}


def manifest(version: int, letter: str) -> PolicyManifest:
    words: dict[str, Any] = {"f": {"kind": "full"}, "d": {"kind": "delta", "base": version - 1}}
    rest = words.get(letter, {"kind": "external"})
    return PolicyManifest(
        version=version, learner="l", step=version, epoch="e", tensors=(), chunks=(), digest="", **rest
    )


@pytest.mark.parametrize(
    ("version", "held", "fetched"),
    [
        (0, -1, [0]),
        (2, -1, [0, 1, 2]),
        (2, 1, [2]),
        (2, 0, [1, 2]),
        (4, 1, [3, 4]),
        (4, 3, [4]),
        (3, 2, [3]),
        (5, 1, [3, 4, 5]),
    ],
)
def test_a_reader_fetches_the_changes_since_what_it_holds_or_begins_at_a_full_version(
    version: int, held: int, fetched: list[int]
) -> None:
    assert [link.version for link in links(manifests("fddfdd"), version, held)] == fetched


@pytest.mark.parametrize(("kinds", "version"), [("fed", 2), ("d", 0), ("fd", 5)])
def test_a_chain_without_a_full_version_on_the_log_is_broken(kinds: str, version: int) -> None:
    with pytest.raises(ChainBroken, match=f"for policy version {version}, are not on the log"):
        links(manifests(kinds), version)


def test_what_builds_on_a_refused_version_is_broken_up_to_the_next_full_one() -> None:
    known = manifests("fdddfd")
    for version in (1, 2, 3):
        with pytest.raises(ChainBroken, match=f"version {version} builds on version 1, which was refused"):
            links(known, version, 0, refused={1})
    assert [link.version for link in links(known, 5, 0, refused={1})] == [4, 5]


@pytest.mark.parametrize(
    ("kinds", "versions", "kept"),
    [
        ("fddd", 1, {0, 1, 2, 3}),
        ("fddf", 1, {3}),
        ("fddf", 2, {0, 1, 2, 3}),
        ("ffff", 2, {2, 3}),
        ("fdfdd", 2, {2, 3, 4}),
        ("fe", 1, {1}),
        ("", 4, set()),
    ],
)
def test_no_version_is_removed_that_a_kept_one_builds_on(kinds: str, versions: int, kept: set[int]) -> None:
    assert needed(manifests(kinds), versions) == kept


@pytest.mark.parametrize(("oldest", "left"), [(5, [3, 4, 5]), (2, [0, 1, 2, 3, 4, 5]), (3, [3, 4, 5]), (-1, [0])])
def test_versions_before_the_full_one_that_all_later_ones_build_on_are_forgotten(oldest: int, left: list[int]) -> None:
    known = manifests("fddfdd")
    forget(known, oldest)
    assert sorted(known) == (left if oldest >= 0 else [0, 1, 2, 3, 4, 5])
    for version in range(max(oldest, 0), 6):
        assert links(known, version)


def test_several_versions_bring_the_versions_that_any_of_them_builds_on() -> None:
    known = manifests("fddfded")
    assert with_bases(known, 2, 4) == {0, 1, 2, 3, 4}
    assert with_bases(known, 1, 3) == {0, 1, 3}
    assert with_bases(known, 6, 1) == {0, 1, 6}, "no chain leads to version 6"
    assert with_bases(known) == set()


@pytest.mark.parametrize(
    ("kinds", "incomplete", "gone"),
    [
        ("fddfdd", set(), set()),
        ("fddfdd", {3}, {3, 4, 5}),
        ("fddfdd", {4}, {4, 5}),
        ("fddfdd", {1, 5}, {5}),
        ("fddfdd", {0, 3}, set(range(6))),
        ("fddfdd", {0, 1, 2}, set()),
        ("eddf", {3}, {1, 2, 3}),
        ("fe", set(), set()),
        ("fe", {0}, {0}),
        ("", set(), set()),
    ],
)
def test_versions_after_the_newest_one_that_can_be_fetched_are_lost(
    kinds: str, incomplete: set[int], gone: set[int]
) -> None:
    known = manifests(kinds)
    assert lost(known, known.keys(), incomplete) == gone


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
