"""`rollstream archive`: where an archiver takes its memory from."""

import argparse
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.tools import archive


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
