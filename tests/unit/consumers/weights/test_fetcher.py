"""Chunks in files on a foreign file system: temporary faults are waited out, and others are reported."""

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from blake3 import blake3

from rollstream.consumers.weights.content import ChunksGone, ChunksLate, WeightsRefused, file_name
from rollstream.consumers.weights.fetcher import MOST_ABANDONED, fetch_files
from rollstream.topics.files.parallel import abandoned_threads
from rollstream.topics.files.stores import FsspecStore
from rollstream.topics.records import Chunk, PolicyManifest
from tests.support.faulty_store import HANG, OTHER_BYTES, SHORT, SLOW_DOWN, FaultyFiles, faulty_store, mistaken
from tests.support.waiting import eventually

FILES = 5


@pytest.fixture
def store() -> Iterator[type[FaultyFiles]]:
    with faulty_store() as files:
        yield files


def manifest(root: str = "faulty://bucket/w") -> PolicyManifest:
    """A version of five files, whose contents are stored if the root is faulty://."""
    chunks = []
    for index in range(FILES):
        data = bytes([index]) * 100
        digest = blake3(data).hexdigest()
        url = f"{root}/{file_name('main', 3, index, digest)}"
        FaultyFiles.objects[url.removeprefix("faulty://")] = data, time.time()
        chunks.append(Chunk(index=index, partition=-1, offset=-1, size_bytes=100, digest=digest, url=url))
    return PolicyManifest(
        version=3, learner="default", step=3, epoch="e", tensors=(), chunks=tuple(chunks), digest=""
    )  # fmt: skip


def fetched(
    wanted: PolicyManifest, *, timeout_s: float = 60.0, stop: threading.Event | None = None
) -> dict[int, bytes]:
    taken: dict[int, bytes] = {}

    def take(chunk: Chunk, data: bytes) -> None:
        if blake3(data).hexdigest() != chunk.digest:
            raise WeightsRefused("it has another digest")
        taken[chunk.index] = data

    fetch_files(wanted, wanted.chunks, take, at_once=3, timeout_s=timeout_s, stop=stop)
    return taken


def test_every_file_is_fetched_though_some_are_slow_or_short_or_altered_for_a_while(store: type[FaultyFiles]) -> None:
    version = manifest()
    store.faults["000001-"].extend([SLOW_DOWN, SLOW_DOWN])
    store.faults["000003-"].extend([SHORT, OTHER_BYTES])
    assert fetched(version) == {index: bytes([index]) * 100 for index in range(FILES)}
    reads = [path for call, path in store.calls if call == "read"]
    assert [sum(f"{index:06d}-" in path for path in reads) for index in range(FILES)] == [1, 3, 1, 3, 1]


def test_files_are_read_at_once_and_no_more_than_allowed(store: type[FaultyFiles]) -> None:
    store.always["w/"] = HANG
    version, reading = manifest(), threading.Thread()

    def read() -> None:
        fetched(version, timeout_s=600)

    reading = threading.Thread(target=read)
    reading.start()
    deadline = time.monotonic() + 60
    while len(store.calls) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(store.calls) == 3
    store.always.clear()
    store.released.set()
    reading.join(60)
    assert not reading.is_alive()
    assert len(store.calls) == FILES


def test_a_read_that_never_returns_does_not_keep_the_memory_of_its_version(store: type[FaultyFiles]) -> None:
    class Content:
        def put(self, _chunk: Chunk, _data: bytes) -> None:
            raise AssertionError("no file arrives")

    store.always["w/"] = HANG
    version, content = manifest(), Content()
    kept = weakref.ref(content)
    with pytest.raises(ChunksLate):
        fetch_files(version, version.chunks, content.put, at_once=3, timeout_s=0.3)
    del content
    eventually(lambda: kept() is None, 60, "the memory is free although three reads still hang")
    store.always.clear()
    store.released.set()


def test_attempts_on_a_store_that_hangs_leave_a_limited_number_of_threads(store: type[FaultyFiles]) -> None:
    eventually(lambda: not abandoned_threads(), 60, "the threads of earlier tests to end")
    store.always["w/"] = HANG
    version = manifest()
    attempts = MOST_ABANDONED // 3 + 5
    for _ in range(attempts):
        with pytest.raises(ChunksLate, match="no answer"):
            fetched(version, timeout_s=0.1)
    assert 0 < abandoned_threads() < MOST_ABANDONED + 3
    assert len(store.calls) < 3 * attempts
    store.always.clear()
    store.released.set()
    eventually(lambda: not abandoned_threads(), 60, "the threads to end once the store answers")
    assert len(fetched(version)) == FILES


def damaged(store: type[FaultyFiles], change: Callable[[bytes], bytes]) -> None:
    [path] = [path for path in store.objects if "000002-" in path]
    store.objects[path] = change(store.objects[path][0]), 0.0


def test_a_missing_file_is_named_at_once(store: type[FaultyFiles]) -> None:
    version = manifest()
    [path] = [path for path in store.objects if "000002-" in path]
    del store.objects[path]
    with pytest.raises(ChunksGone, match=r"faulty://bucket/w/main/00000003/000002-.*chunk 2 of .* is missing"):
        fetched(version)


def test_a_file_that_is_cut_short_in_the_store_is_named_at_once(store: type[FaultyFiles]) -> None:
    version = manifest()
    damaged(store, lambda data: data[:60])
    with pytest.raises(WeightsRefused, match=r"faulty://.*000002-.* has 60 bytes instead of 100; the next"):
        fetched(version)


def test_a_file_with_other_bytes_is_named_after_a_second_look(store: type[FaultyFiles]) -> None:
    version = manifest()
    damaged(store, lambda data: b"x" + data[1:])
    with pytest.raises(WeightsRefused, match=r"faulty://.*000002-\w+ is damaged: it has another digest; the next full"):
        fetched(version)
    assert sum("000002-" in path for call, path in store.calls if call == "read") == 2


@pytest.mark.parametrize(
    ("fault", "message"), [(SLOW_DOWN, "503 Slow Down"), (SHORT, "50 of 100 bytes arrived"), (HANG, "no answer")]
)
def test_a_store_that_stays_unable_is_named_with_what_was_wrong_and_the_remedy(
    store: type[FaultyFiles], fault: str, message: str
) -> None:
    version = manifest()
    store.always["w/"] = fault
    with pytest.raises(ChunksLate, match="5 of 5 files of policy version 3 have not arrived") as late:
        fetched(version, timeout_s=0.5)
    text = str(late.value)
    assert message in text
    assert "faulty://bucket/w/main/" in text
    assert "check the store, and the credentials" in text
    assert "\n" not in text
    assert "password" not in text
    assert "secret" not in text


def test_a_fetch_ends_when_it_is_told_to(store: type[FaultyFiles]) -> None:
    stop = threading.Event()
    store.always["w/"] = SLOW_DOWN
    threading.Timer(0.2, stop.set).start()
    with pytest.raises(ChunksLate):
        fetched(manifest(), timeout_s=600, stop=stop)


def test_a_directory_that_is_not_there_may_come_and_a_protocol_nobody_knows_too(
    store: type[FaultyFiles], tmp_path: Path
) -> None:
    version = manifest(str(tmp_path / "unmounted"))
    with pytest.raises(ChunksLate, match="is it mounted"):
        fetched(version, timeout_s=0.3)
    (tmp_path / "unmounted").mkdir(exist_ok=True)
    with pytest.raises(ChunksLate, match="is it mounted"):
        fetched(version, timeout_s=0.3)
    with pytest.raises(ChunksLate, match=r"nosuch://.*fsspec cannot open it"):
        fetched(manifest("nosuch://bucket"), timeout_s=60)


def test_a_mistake_of_ours_is_raised_and_not_tried_again(
    store: type[FaultyFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    version = manifest()
    monkeypatch.setattr(FsspecStore, "read", mistaken)
    with pytest.raises(NameError):
        fetched(version, timeout_s=1)
