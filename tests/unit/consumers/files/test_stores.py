"""Stores report the sizes and ages of their objects, and messages about stores hold no secret."""

import errno
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from rollstream.consumers.files.stores import open_store, shown

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


@given(user=WORDS, host=WORDS, path=WORDS)
def test_a_shown_text_keeps_urls_without_passwords_and_queries(user: str, host: str, path: str) -> None:
    message = f"GET https://{user}:PASSWORD@{host}/{path}?X-Signature=SECRET, then s3://{host}/{path}: 503"
    assert shown(message) == f"GET https://{host}/{path}, then s3://{host}/{path}: 503"
    assert shown(f"sftp://{user}@{host}/{path} is it there?") == f"sftp://{user}@{host}/{path} is it there?"
