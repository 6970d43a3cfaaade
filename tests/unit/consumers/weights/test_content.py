"""Compression of weights: only where it pays, and back to the same bytes."""

import contextlib
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.content import (
    ChunkFile,
    NotCompressed,
    compress,
    decompress,
    file_name,
    folder_of,
    in_files,
    parsed,
    pays,
    place_of,
    root_of,
)
from rollstream.topics.errors import ConfigurationError

RNG = np.random.default_rng(0)
NOISE = RNG.standard_normal(500_000).astype("<f4")


@given(st.binary(max_size=200))
def test_content_comes_back_as_it_was(content: bytes) -> None:
    assert decompress(compress(content), len(content)) == content


@given(st.binary(max_size=100), st.integers(0, 200))
def test_bytes_of_unknown_origin_are_content_of_that_size_or_refused(stored: bytes, size: int) -> None:
    with contextlib.suppress(NotCompressed):
        assert len(decompress(stored, size)) == size


@pytest.mark.parametrize("declares", [True, False])
@pytest.mark.parametrize("size", [9_999, 10_001])
def test_content_of_another_size_is_refused(size: int, declares: bool) -> None:
    stored = zstandard.ZstdCompressor(write_content_size=declares).compress(bytes(10_000))
    with pytest.raises(NotCompressed, match=rf"(instead of|not zstd of) {size}\b"):
        decompress(stored, size)


def test_a_frame_that_declares_more_takes_no_more_memory() -> None:
    stored = zstandard.compress(bytes(256 * 1024 * 1024))
    tracemalloc.start()
    try:
        with pytest.raises(NotCompressed, match="zstd of 268435456 bytes instead of 1024"):
            decompress(stored, 1024)
        assert tracemalloc.get_traced_memory()[1] < 1024 * 1024
    finally:
        tracemalloc.stop()


def test_bytes_after_a_frame_are_refused() -> None:
    with pytest.raises(NotCompressed, match="not zstd of 4 bytes"):
        decompress(compress(b"data") + b"more", 4)


def test_random_parameters_are_not_worth_it_and_sparse_ones_are() -> None:
    sparse = np.where(RNG.random(NOISE.size) < 0.1, NOISE, 0).astype("<f4")
    assert not pays([memoryview(NOISE.view(np.uint8))])
    assert pays([memoryview(sparse.view(np.uint8))])
    assert not pays([])


def test_the_sample_is_of_the_whole_and_not_of_its_beginning() -> None:
    zeros = np.zeros(60_000, np.uint8)
    assert not pays([memoryview(zeros), memoryview(NOISE.view(np.uint8))])


RUNS = st.from_regex(r"[A-Za-z0-9._-]{1,20}", fullmatch=True)
NUMBERS = st.integers(0, 10**12)
DIGESTS = st.text("0123456789abcdef", min_size=64, max_size=64)


@given(run=RUNS, version=NUMBERS, chunk=NUMBERS, digest=DIGESTS, root=st.sampled_from(["/weights", "s3://bucket", "/"]))
def test_a_name_says_what_a_file_holds_and_where_it_lies(
    run: str, version: int, chunk: int, digest: str, root: str
) -> None:
    name = file_name(run, version, chunk, digest)
    assert parsed(run, name) == ChunkFile(version, chunk, digest)
    url = f"{root.rstrip('/')}/{name}"
    assert place_of(url) == (root, name)
    assert root_of(run, url) == root
    assert parsed(run + "x", name) is None, "runs share a store"
    assert parsed(run, f"{name}.4711-0a.unfinished") == ChunkFile(version, chunk, digest, whole=False)


@pytest.mark.parametrize("name", ["main", "main/notes.txt", "main/1/2-3", "main/00000001/000000-xyz", "other/00000001"])
def test_files_of_others_are_not_ours(name: str) -> None:
    assert parsed("main", name) is None
    assert root_of("main", f"/weights/{name}") is None
    assert folder_of(f"/weights/{name}") is None


@pytest.mark.parametrize(("run", "folder"), [("main", ("/w", "main")), ("..", None), ("", None), (".hidden", None)])
def test_the_folder_of_a_file_is_that_of_a_run_and_leads_out_of_no_store(
    run: str, folder: tuple[str, str] | None
) -> None:
    assert folder_of(f"/w/{run}/00000001/000000-{'0' * 64}") == folder


@given(size=st.integers(0, 10**12), limit=st.integers(0, 10**12))
def test_files_are_used_if_a_url_is_set_and_the_version_is_larger_than_the_limit(size: int, limit: int) -> None:
    assert in_files(WeightsConfig(url="/w", files_above_bytes=limit), size) == (size > limit)
    assert not in_files(WeightsConfig(files_above_bytes=limit), size)
    assert in_files(WeightsConfig(url="/w", transport="files", files_above_bytes=limit), size)
    assert not in_files(WeightsConfig(url="/w", transport="log", files_above_bytes=limit), size)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"transport": "files"}, "learner.weights.url is empty"),
        ({"url": "s3://key:verysecret@bucket/x"}, "credentials in the environment"),
        ({"url": "https://store.example/x?sig=verysecret"}, "credentials in the environment"),
        ({"file_bytes": 0}, "file_bytes 0"),
        ({"files_at_once": 0}, "files_at_once 0"),
        ({"store_timeout_s": 0.0}, "store_timeout_s is 0"),
        ({"shards_timeout_s": 0.0}, "shards_timeout_s is 0"),
        ({"orphan_hours": -1.0}, "orphan_hours is -1"),
    ],
)
def test_settings_that_cannot_be_are_refused_and_no_secret_is_shown(settings: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text) as refused:
        WeightsConfig(**settings)  # type: ignore[arg-type]
    assert "verysecret" not in str(refused.value)
