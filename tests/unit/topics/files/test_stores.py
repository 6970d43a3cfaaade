"""Stores report the sizes and ages of their objects and what keeps them from working, and messages about stores hold no
secret."""

import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from rollstream.topics.files.atomic_files import StoreError
from rollstream.topics.files.stores import Store, open_store, shown
from tests.support.s3_server import s3_server, wrong_keys

WORDS = st.from_regex(r"[a-z0-9]{4,12}", fullmatch=True)


@pytest.mark.parametrize("url", ["{}", "file://{}", "local://{}", "memory://{}"])
def test_a_store_lists_sizes_and_times_below_a_folder(url: str, tmp_path: Path) -> None:
    store = open_store(url.format(tmp_path / "store"))
    assert store.listing("a") == {}
    began = time.time()
    for name in ("a/b/one", "a/two", "ab/three"):
        store.write(name, name.encode())
    listed = store.listing("a")
    assert {name: file.size_bytes for name, file in listed.items()} == {"a/b/one": 7, "a/two": 5}
    for name, file in listed.items():
        assert file.modified is not None
        assert abs(file.modified - began) < 600
        assert store.size_bytes(name) == file.size_bytes
    store.delete("a/two")
    assert sorted(store.listing("a")) == ["a/b/one"]
    with pytest.raises(FileNotFoundError):
        store.size_bytes("a/two")


class WithoutConditions(MemoryFileSystem):
    """A store that answers, as s3fs passes it on, that it has no conditional writes."""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        if mode == "create":
            raise OSError(errno.ENOSYS, "A header you provided implies functionality that is not implemented")
        super().pipe_file(path, value, mode, **options)


def test_a_store_without_conditional_writes_looks_before_it_creates() -> None:
    fsspec.register_implementation("unconditional", WithoutConditions, clobber=True)
    store = open_store("unconditional://conditions")
    assert store.create("a", b"first")
    assert not store.create("a", b"second")
    assert store.read("a") == b"first"


class Unreachable(MemoryFileSystem):
    """A store whose client raises errors of its own class, with secrets, for every call."""

    def find(self, path: str, maxdepth: int | None = None, withdirs: bool = False, **options: Any) -> Any:
        raise ClientError

    def info(self, path: str, **options: Any) -> Any:
        raise ClientError

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        raise ClientError

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        raise ClientError

    def exists(self, path: str, **options: Any) -> bool:
        raise ClientError


class ClientError(Exception):
    """No OSError, as those of botocore."""

    def __str__(self) -> str:
        return "no answer\nfrom https://somebody:PASSWORD@store.example/bucket?X-Signature=SECRET"


CALLS: dict[str, Callable[[Store], object]] = {
    "listed": lambda store: store.names("below"),
    "listed ": lambda store: store.listing("below"),
    "read": lambda store: store.read("below"),
    "read ": lambda store: store.size_bytes("below"),
    "written": lambda store: store.write("below", b""),
    "written ": lambda store: store.create("below", b""),
    "deleted": lambda store: store.delete("below"),
}


@pytest.mark.parametrize("done", CALLS)
def test_a_store_that_fails_is_named_in_one_line_with_the_cause_and_the_remedy_and_no_secret(done: str) -> None:
    fsspec.register_implementation("unreachable", Unreachable, clobber=True)
    store = open_store("unreachable://somebody:KEY@bucket/archive")
    with pytest.raises(StoreError) as refused:
        CALLS[done](store)
    assert str(refused.value) == (
        f"unreachable://bucket/archive/below cannot be {done.strip()} (ClientError: no answer from "
        "https://store.example/bucket); check the store, and the credentials in the environment of this process"
    )


def test_a_bucket_whose_server_does_not_know_the_keys_is_named() -> None:
    with s3_server() as bucket:
        store = open_store(f"{bucket}/archive")
        store.write("a", b"written with the right keys")
        with wrong_keys():
            for done, call in CALLS.items():
                with pytest.raises(StoreError, match=rf"^{bucket}/archive/below cannot be {done.strip()} \("):
                    call(store)
        assert store.names("") == ["a"]
        with pytest.raises(FileNotFoundError):
            store.read("b")


def test_a_disk_that_fails_is_named(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    (tmp_path / "folder" / "below").mkdir(parents=True)
    with pytest.raises(StoreError, match=r"folder cannot be read \(Is a directory\); check the disk"):
        store.read("folder")
    with pytest.raises(StoreError, match=r"folder cannot be deleted \(Is a directory\); check the disk"):
        store.delete("folder")
    with pytest.raises(StoreError, match=r"cannot be listed \(File name too long\); check the disk"):
        store.names("x" * 300)
    with pytest.raises(StoreError, match=r"cannot be read \(embedded null byte\); check the disk"):
        store.read("a\0")
    assert store.names("nothing") == []


@given(user=WORDS, host=WORDS, path=WORDS)
def test_a_shown_text_keeps_urls_without_passwords_and_queries(user: str, host: str, path: str) -> None:
    message = f"GET https://{user}:PASSWORD@{host}/{path}?X-Signature=SECRET, then s3://{host}/{path}: 503"
    assert shown(message) == f"GET https://{host}/{path}, then s3://{host}/{path}: 503"
    assert shown(f"sftp://{user}@{host}/{path} is it there?") == f"sftp://{user}@{host}/{path} is it there?"
