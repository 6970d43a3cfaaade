"""The process that fills an index reports how far it is, also when the index of an idle log moves on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.index import filling_process, rollout_query
from rollstream.pipeline.index.filling_process import Filled
from rollstream.pipeline.index.rollout_query import RolloutFilter
from rollstream.pipeline.index.run_index import IndexProgress, RunIndex
from tests.support.archived_run import archive_run

PATIENCE_S = 120.0


@contextmanager
def reports(config: RunConfig, archive: str) -> Iterator[Callable[[], IndexProgress]]:
    """The process, and a function that returns its next report."""
    pipe, process = filling_process.start(config, archive)

    def report() -> IndexProgress:
        assert pipe.poll(PATIENCE_S), "the process has reported nothing more"
        filled: Filled = pipe.recv()
        assert filled.progress is not None, filled.problem
        return filled.progress

    try:
        yield report
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another process"])
def test_an_archive_that_grows_is_reported_to_each_server(tmp_path: Path, beside: bool) -> None:
    """A run has one index, which one process fills; another one reports what this process has filled."""
    archive, config = str(tmp_path / "archive"), RunConfig(data_dir=tmp_path)
    archive_run(tmp_path / "archive", 1)
    with RunIndex.open(config, archive, fills=beside) as other, reports(config, archive) as report:
        if beside:
            other.catch_up()
        while (first := report()).offset_done < first.offset_total:
            pass
        archive_run(tmp_path / "archive", 2)
        if beside:
            other.catch_up()
        while (now := report()).offset_done <= first.offset_total:
            pass
        while now.offset_done < now.offset_total:
            now = report()
        assert other.progress() == now
        assert rollout_query.page(other.db, RolloutFilter())["matching"] == 16
