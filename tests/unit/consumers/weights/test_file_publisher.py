"""Versions written to files: stored whole, used again after a kill, removed when nobody needs them."""

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.content import Content
from rollstream.consumers.weights.fetcher import fetch_files
from rollstream.consumers.weights.file_publisher import FilePublisher
from rollstream.consumers.weights.file_retention import remove_files
from rollstream.consumers.weights.layout import ContentBuffer, full_content
from rollstream.topics.errors import DeliveryError
from rollstream.topics.files.stores import FsspecStore
from rollstream.topics.records import Chunk, PolicyManifest
from rollstream.topics.wire.params_digest import tensor_digests, tree_digest
from tests.support.faulty_store import HANG, SHORT, SLOW_DOWN, FaultyFiles, faulty_store, mistaken
from tests.support.log_lines import log_lines
from tests.support.waiting import eventually

CONFIG = WeightsConfig(url="faulty://bucket/w", file_bytes=1000, keep_versions=1)


@pytest.fixture
def store() -> Iterator[type[FaultyFiles]]:
    with faulty_store() as files:
        yield files


def params(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {f"layer.{number}": random.standard_normal(300).astype("<f4") for number in range(4)}


def content_of(arrays: dict[str, np.ndarray]) -> Content:
    return full_content(arrays, tensor_digests(arrays))


def manifest(version: int, arrays: dict[str, np.ndarray], chunks: tuple[Chunk, ...]) -> PolicyManifest:
    return PolicyManifest(
        version=version,
        learner="default",
        step=version,
        epoch="e",
        tensors=content_of(arrays).tensors,
        chunks=chunks,
        digest=tree_digest(tensor_digests(arrays)),
    )


def read(wanted: PolicyManifest) -> dict[str, np.ndarray]:
    buffer = ContentBuffer(wanted)
    fetch_files(wanted, wanted.chunks, buffer.put, at_once=4, timeout_s=60)
    return buffer.arrays()


@pytest.mark.parametrize("url", ["faulty://bucket/w", "memory://bucket/w", "{}", "file://{}"])
@pytest.mark.parametrize("compressible", [False, True])
def test_what_is_written_is_read(store: type[FaultyFiles], url: str, compressible: bool, tmp_path: Path) -> None:
    arrays = {name: 0 * array if compressible else array for name, array in params(0).items()}
    publisher = FilePublisher("main", replace(CONFIG, url=url.format(tmp_path)), {})
    chunks = publisher.write(7, content_of(arrays))
    assert [chunk.index for chunk in chunks] == list(range(5))
    assert {(chunk.partition, chunk.offset, chunk.codec) for chunk in chunks} == {(-1, -1, "zstd" * compressible)}
    read_back = read(manifest(7, arrays, chunks))
    assert all(np.array_equal(read_back[name], array) for name, array in arrays.items())


def test_a_store_that_fails_or_cuts_off_for_a_while_gets_every_byte(store: type[FaultyFiles]) -> None:
    store.faults["000002-"].extend([SLOW_DOWN, SHORT])
    chunks = FilePublisher("main", CONFIG, {}).write(0, content_of(params(0)))
    assert {chunk.url.removeprefix("faulty://"): chunk.size_bytes for chunk in chunks} == {
        path: len(data) for path, (data, _) in store.objects.items()
    }


@pytest.mark.parametrize(("fault", "text"), [(SLOW_DOWN, "503 Slow Down"), (HANG, "no answer")])
def test_a_store_that_stays_unable_ends_the_publication_with_url_cause_and_remedy(
    store: type[FaultyFiles], fault: str, text: str
) -> None:
    store.always["w/"] = fault
    publisher = FilePublisher("main", replace(CONFIG, store_timeout_s=0.4), {})
    with pytest.raises(
        DeliveryError, match=f"not written to faulty://bucket/w within.*{text}.*start the learner"
    ) as error:
        publisher.write(0, content_of(params(0)))
    assert "secret" not in str(error.value)
    assert "password" not in str(error.value)


def test_the_next_publisher_writes_only_what_the_killed_one_had_not_stored(store: type[FaultyFiles]) -> None:
    content = content_of(params(0))
    before = FilePublisher("main", CONFIG, {}).write(4, content)
    paths = [chunk.url.removeprefix("faulty://") for chunk in before]
    del store.objects[paths[1]]
    store.objects[paths[2]] = store.objects[paths[2]][0][:9], time.time()
    store.objects[paths[3]] = b"x" + store.objects[paths[3]][0][1:], time.time()
    store.calls.clear()
    assert FilePublisher("main", CONFIG, {}).write(4, content) == before
    assert sorted(path for call, path in store.calls if call == "write") == paths[1:4]
    assert read(manifest(4, params(0), before))


def test_a_file_that_grew_old_while_its_publisher_waited_is_written_again(store: type[FaultyFiles]) -> None:
    """Otherwise `rollstream prune` could remove it before a manifest names it."""
    content = content_of(params(0))
    chunks = FilePublisher("main", CONFIG, {}).write(4, content)
    half_s = CONFIG.orphan_hours * 3600 / 2
    aged = time.time() - half_s + 2.0
    store.objects = {path: (data, aged) for path, (data, _) in store.objects.items()}
    publisher = FilePublisher("main", CONFIG, {})
    eventually(lambda: time.time() > aged + half_s, 60, "the files are too old")
    store.calls.clear()
    assert publisher.write(4, content) == chunks
    assert len([path for call, path in store.calls if call == "write"]) == len(chunks)


def test_files_that_the_manifest_of_a_newer_release_names_stay(store: type[FaultyFiles], tmp_path: Path) -> None:
    config = replace(CONFIG, url=str(tmp_path))
    committed = {3: manifest(3, params(0), FilePublisher("main", config, {}).write(3, content_of(params(0))))}
    FilePublisher("main", config, committed).write(4, content_of(params(1)))
    newer = sorted(tmp_path.glob("main/00000004/*"))
    os.utime(newer[0], (1.0, 1.0))
    publisher = FilePublisher("main", config, committed, {4})
    version = manifest(5, params(0), publisher.write(5, content_of(params(0))))
    publisher.committed(version)
    assert sorted(tmp_path.glob("main/00000004/*")) == newer


def test_a_publisher_knows_which_versions_it_needs_have_lost_files(store: type[FaultyFiles]) -> None:
    versions = {
        version: manifest(
            version, params(version), FilePublisher("main", CONFIG, {}).write(version, content_of(params(version)))
        )
        for version in range(2)
    }
    assert FilePublisher("main", CONFIG, versions).incomplete == set()
    path = versions[1].chunks[2].url.removeprefix("faulty://")
    store.objects[path] = store.objects[path][0][:9], time.time()
    assert FilePublisher("main", CONFIG, versions).incomplete == {1}
    del store.objects[path]
    assert FilePublisher("main", CONFIG, versions).incomplete == {1}
    store.faults["list:"].append(SLOW_DOWN)
    assert FilePublisher("main", CONFIG, versions).incomplete == set(), "it cannot tell"


def test_files_of_an_attempt_that_was_not_committed_go_with_the_first_version_or_by_age(
    store: type[FaultyFiles], tmp_path: Path
) -> None:
    config = replace(CONFIG, url=str(tmp_path))
    arrays, others = params(0), params(1)
    committed = {3: manifest(3, arrays, FilePublisher("main", config, {}).write(3, content_of(arrays)))}
    publisher = FilePublisher("main", config, committed)
    publisher.write(4, content_of(others))
    [old, *_] = lost = sorted(tmp_path.glob("main/00000004/*"))
    os.utime(old, (1.0, 1.0))
    (unfinished := old.with_name(f"{old.name}.1-a.unfinished")).touch()
    (stranger := old.with_name("notes")).touch()

    publisher = FilePublisher("main", config, committed)
    assert not old.exists()
    assert not unfinished.exists()
    assert all(path.exists() for path in [*lost[1:], stranger])
    version = manifest(4, arrays, publisher.write(4, content_of(arrays)))
    publisher.committed(version)
    assert not any(path.exists() for path in lost), "its bytes were others"
    assert stranger.exists()
    assert read(version)
    assert read(committed[3])

    FilePublisher("main", config, committed | {4: version})
    assert not list(tmp_path.glob("main/00000003/*")), "nothing that is kept needs version 3"
    assert not (tmp_path / "main/00000003").exists()
    assert read(version)


def test_a_publisher_starts_though_the_store_gives_no_list(
    store: type[FaultyFiles], caplog: pytest.LogCaptureFixture
) -> None:
    store.faults["w/"].append(SLOW_DOWN)
    chunks = FilePublisher("main", CONFIG, {}).write(0, content_of(params(0)))
    assert read(manifest(0, params(0), chunks))
    assert "weight_files_left" in log_lines(caplog)
    assert "password" not in log_lines(caplog)


@pytest.mark.parametrize("call", ["write", "listing"])
def test_a_mistake_of_ours_is_raised_and_not_tried_again(
    store: type[FaultyFiles], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(FsspecStore, call, mistaken)
    with pytest.raises(NameError):
        FilePublisher("main", replace(CONFIG, store_timeout_s=1.0), {}).write(0, content_of(params(0)))


def test_a_mistake_of_ours_is_no_file_that_was_not_removed(
    store: type[FaultyFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FsspecStore, "delete", mistaken)
    with pytest.raises(NameError):
        remove_files([f"{CONFIG.url}/main/00000000/file"], at_once=1, timeout_s=60)
