"""Shards: the version is the same whichever process publishes which tensors, and the shares are of similar size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.layout import assemble, full_content, split
from rollstream.consumers.weights.shards import Draft, Offer, Plan, Shard, draft, joined, owners, planned
from rollstream.topics.errors import StateRefused
from rollstream.topics.records import Chunk, PolicyManifest
from rollstream.topics.wire.codec import decode, encode
from rollstream.topics.wire.params_digest import params_digest

CONFIG = WeightsConfig(chunk_bytes=100)
names = st.text("abcxyz._0123456789", min_size=1, max_size=8)
counts = st.dictionaries(names, st.integers(0, 120), max_size=9)


def sent(share: Draft, plan: Plan, process: int) -> tuple[Shard, list[bytes]]:
    """The shard that a process sends, and its bytes."""
    content = share.delta if plan.delta and share.delta is not None else full_content(share.arrays)
    pieces = list(split(content.views, CONFIG.chunk_bytes))
    chunks = tuple(
        Chunk(index=index, partition=0, offset=0, size_bytes=len(piece), digest="", content_bytes=len(piece))
        for index, piece in enumerate(pieces, plan.first_chunks[process])
    )
    return Shard(tensors=share.tensors(content), chunks=chunks, full_bytes=share.offer.full_bytes), pieces


def published(
    params: dict[str, np.ndarray], processes: int, before: dict[str, np.ndarray] | None = None
) -> tuple[PolicyManifest, list[bytes]]:
    """The manifest of a version that so many processes publish, and the bytes of its chunks."""
    owned = owners({name: array.nbytes for name, array in params.items()}, processes)
    drafts = []
    for process in range(processes):
        arrays = {name: array for name, array in params.items() if owned[name] == process}
        known = None if before is None else {name: before[name] for name in arrays}
        drafts.append(draft(arrays, known, alone=processes == 1))
    plan = planned([share.offer for share in drafts], CONFIG)
    shards = [sent(share, plan, process) for process, share in enumerate(drafts)]
    tensors, chunks, digest = joined(shard for shard, _pieces in shards)
    fields = {"kind": "delta" if plan.delta else "full", "base": 3 if plan.delta else -1}
    manifest = PolicyManifest(
        version=4, learner="l", step=4, epoch="e", tensors=tensors, chunks=chunks, digest=digest, **fields
    )
    return decode(encode(manifest)), [piece for _shard, pieces in shards for piece in pieces]


def made(sizes: dict[str, int], seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(size).astype("<f4") for name, size in sizes.items()}


@given(counts, st.integers(1, 5), st.integers(0, 9))
def test_a_version_is_the_same_whatever_the_number_of_processes(
    sizes: dict[str, int], processes: int, seed: int
) -> None:
    params = made(sizes, seed)
    manifest, pieces = published(params, processes)
    alone, _pieces = published(params, 1)
    assert manifest.digest == alone.digest == params_digest(params)
    assert [chunk.index for chunk in manifest.chunks] == list(range(len(pieces)))
    assert [(t.name, t.digest) for t in manifest.tensors] == [(t.name, t.digest) for t in alone.tensors]
    assembled = assemble(manifest, pieces)
    assert assembled.keys() == params.keys()
    assert all(np.array_equal(assembled[name], array) for name, array in params.items())


@given(counts, st.integers(1, 5), st.integers(0, 9), st.floats(0.0, 1.0))
def test_changes_of_all_processes_make_the_version_after(
    sizes: dict[str, int], processes: int, seed: int, share: float
) -> None:
    before = made(sizes, seed)
    params = {name: array.copy() for name, array in before.items()}
    random = np.random.default_rng(seed)
    for array in params.values():
        array[random.random(array.shape) < share] += 1
    manifest, pieces = published(params, processes, before)
    assert manifest.kind == published(params, 1, before)[0].kind, "all together decide whether changes are sent"
    assert manifest.digest == params_digest(params)
    assembled = assemble(manifest, pieces, before)
    assert all(np.array_equal(assembled[name], array) for name, array in params.items())


@given(st.dictionaries(names, st.integers(0, 2**40), max_size=30), st.integers(1, 9))
def test_every_tensor_has_one_process_and_none_has_much_more_than_the_average(
    sizes: dict[str, int], processes: int
) -> None:
    owned = owners(sizes, processes)
    assert owned.keys() == sizes.keys()
    loads = [sum(sizes[name] for name in owned if owned[name] == process) for process in range(processes)]
    assert max(loads) <= sum(loads) / processes + max(sizes.values(), default=0)
    assert owners(dict(reversed(sizes.items())), processes) == owned, "each process finds it by itself"


def test_the_size_of_all_together_decides_how_a_version_is_sent() -> None:
    files = WeightsConfig(url="somewhere", files_above_bytes=99)
    half = [Offer(full_bytes=100, delta_bytes=0), Offer(full_bytes=100, delta_bytes=100)]
    assert planned(half, CONFIG).delta
    assert planned(half, files).files
    assert not planned([half[0], Offer(full_bytes=100, delta_bytes=101)], CONFIG).delta
    assert not planned([half[0], Offer(full_bytes=100)], CONFIG).delta, "one process has nothing to compare with"
    assert not planned([Offer(full_bytes=50), Offer(full_bytes=49)], files).files


def test_a_tensor_that_two_processes_send_is_refused() -> None:
    arrays = {"w": np.zeros(3, "<f4")}
    share = draft(arrays, None, alone=False)
    plan = planned([share.offer, share.offer], CONFIG)
    with pytest.raises(StateRefused, match="tensor w was sent by two processes"):
        joined(sent(share, plan, process)[0] for process in range(2))
