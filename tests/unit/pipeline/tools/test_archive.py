"""`rollstream archive`: where an archiver takes its memory from, and faults of the store."""

import argparse
import contextlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.tools import archive
from rollstream.topics.files.atomic_files import StoreError
from tests.support.command_line import answer_of
from tests.support.s3_server import s3_server, wrong_keys


@pytest.mark.parametrize("follow", [True, False])
def test_only_an_archiver_that_follows_has_arrow_take_memory_that_can_be_given_back(
    follow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, pools = pa.default_memory_pool(), list[str]()

    def interrupted(*_arguments: Any, **_options: Any) -> None:
        pools.append(pa.default_memory_pool().backend_name)
        raise KeyboardInterrupt

    monkeypatch.setattr(archive, "Archiver", interrupted)
    parser = argparse.ArgumentParser()
    archive.register(parser)
    words = [str(tmp_path / "archive"), *(["--follow"] if follow else [])]
    try:
        with pytest.raises(KeyboardInterrupt):
            archive.show_archive(RunConfig(), parser.parse_args(words))
    finally:
        pa.set_memory_pool(before)
    assert pools == ["system" if follow else before.backend_name]


@pytest.mark.parametrize(
    "words",
    [
        ("archive", "{}", "--check"),
        ("archive", "{}", "--compact"),
        ("sql", "select 1", "--archive", "{}"),
        ("restore", "{}", "--into", "again"),
    ],
)
def test_an_archive_whose_store_refuses_the_keys_ends_a_command_with_one_line(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    with s3_server() as bucket, wrong_keys():
        done = answer_of(tmp_path, *(word.format(f"{bucket}/runs") for word in words))
    assert (done.returncode, done.stdout) == (2, "")
    # The server logs from this process, too.
    [line] = [line for line in done.stderr.splitlines() if '"logger": "werkzeug"' not in line]
    assert f"{bucket}/runs/" in line
    assert "check the store, and the credentials" in line


def test_an_archiver_that_follows_outlives_a_store_that_fails_once_the_archive_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The brokers' part of the archiver is left out: it fails to open, opens and fails, and opens again."""
    calls: list[str] = []

    class Failing(contextlib.nullcontext["Failing"]):
        def __enter__(self) -> "Failing":
            calls.append("open")
            if calls == ["open"] and opens_badly:
                raise StoreError("no answer")
            return self

        def once(self) -> None:
            calls.append("read")
            if calls.count("read") == 2:
                raise KeyboardInterrupt
            raise StoreError("no answer")

    monkeypatch.setattr(archive, "Archiver", lambda *_arguments, **_options: Failing())
    parser = argparse.ArgumentParser()
    archive.register(parser)
    args = parser.parse_args([str(tmp_path / "archive"), "--follow", "--every", "0.001"])
    before = pa.default_memory_pool()
    try:
        opens_badly = True
        with pytest.raises(StoreError):
            archive.show_archive(RunConfig(), args)
        opens_badly = False
        calls.clear()
        with pytest.raises(KeyboardInterrupt):
            archive.show_archive(RunConfig(), args)
    finally:
        pa.set_memory_pool(before)
    assert calls == ["open", "read", "open", "read"]
