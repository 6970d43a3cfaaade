"""`rollstream archive`: where an archiver takes its memory from."""

import argparse
from pathlib import Path
from typing import Any, ClassVar, Self

import pyarrow as pa
import pytest

from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.tools import archive


class Unfollowed:
    """An archiver that is interrupted at its first look at the log, and notes which memory Arrow takes by then."""

    pools: ClassVar[list[str]] = []

    def __init__(self, *_arguments: Any, **_options: Any) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None: ...

    def once(self) -> None:
        self.pools.append(pa.default_memory_pool().backend_name)
        raise KeyboardInterrupt


@pytest.mark.parametrize("follow", [True, False])
def test_only_an_archiver_that_follows_has_arrow_take_memory_that_can_be_given_back(
    follow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "Archiver", Unfollowed)
    monkeypatch.setattr(Unfollowed, "pools", [])
    before = pa.default_memory_pool()
    parser = argparse.ArgumentParser()
    archive.register(parser)
    words = [str(tmp_path / "archive"), *(["--follow"] if follow else [])]
    try:
        with pytest.raises(KeyboardInterrupt):
            archive.show_archive(RunConfig(), parser.parse_args(words))
    finally:
        pa.set_memory_pool(before)
    assert Unfollowed.pools == ["system" if follow else before.backend_name]
