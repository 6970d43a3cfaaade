"""Times of an index over many rollouts: how fast it is filled, and how long each filter takes; only reported."""

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rollstream.pipeline.index import rollout_query, sqlite_files
from rollstream.pipeline.index.rollout_query import RolloutFilter
from rollstream.pipeline.index.writer import IndexWriter
from tests.support.index_logs import Chunk, EndlessLog, MadeRun

_PARTITIONS = 4
_FILTERS = {
    "none": (RolloutFilter(), "newest"),
    "none, by reward": (RolloutFilter(), "reward"),
    "none, by advantage": (RolloutFilter(), "advantage"),
    "environment": (RolloutFilter(environment="env1"), "newest"),
    "environment, by reward": (RolloutFilter(environment="env1"), "reward"),
    "environment and worker": (RolloutFilter(environment="env1", worker="worker-2"), "newest"),
    "fate": (RolloutFilter(fate="trained"), "newest"),
    "drop reason": (RolloutFilter(fate="dropped", reason="zero_variance"), "oldest"),
    "nothing matches": (RolloutFilter(fate="dead_lettered", environment="env1"), "reward"),
    "versions": (RolloutFilter(version_min=0, version_max=1), "newest"),
    "rewards": (RolloutFilter(reward_min=0.7, reward_max=0.8), "newest"),
    "uid": (RolloutFilter(uid="u000000012-3"), "newest"),
    "step": (RolloutFilter(step=2), "newest"),
    "common text": (RolloutFilter(text="the answer"), "newest"),
    "common text, by reward": (RolloutFilter(text="remainder"), "reward"),
    "rare text": (RolloutFilter(text="case 00000000123"), "newest"),
    "text that is nowhere": (RolloutFilter(text="and then the one"), "newest"),
    "text and a rare fate": (RolloutFilter(text="the", fate="dead_lettered"), "newest"),
}


@pytest.mark.parametrize("count", [2000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_times_of_filters_are_reported(count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "index.sqlite"
    made = MadeRun(partitions=_PARTITIONS)
    began = time.process_time()
    with IndexWriter(path, EndlessLog(chunks(made, count))) as writer:
        while writer.poll():
            pass
    lines = [f"filled in {time.process_time() - began:.1f} s of a processor, records made included"]
    with closing(sqlite_files.reader(path)) as db:
        rollouts = rollout_query.page(db, RolloutFilter())["matching"]
        assert rollouts >= count
        for name, (wanted, order) in _FILTERS.items():
            began = time.thread_time()
            page = rollout_query.page(db, wanted, order)
            lines.append(f"{1000 * (time.thread_time() - began):8.1f} ms  {name}: {page['matching']:,}")
        began = time.thread_time()
        fates = rollout_query.facets(db)["fates"]
        assert sum(count for fate, count in fates.items() if fate != "control") == rollouts
        lines.append(f"{1000 * (time.thread_time() - began):8.1f} ms  facets")
    if count > 10_000:
        with capsys.disabled():
            print(f"\nindex of {rollouts:,} records:", *lines, sep="\n  ")


def chunks(made: MadeRun, count: int) -> Iterator[Chunk]:
    """Chunks with at least `count` records that are listed: all of `rollouts` except a mark on each partition."""
    sent = 0
    while sent < count:
        chunk = made.chunk()
        sent += sum(name == "rollouts" for name, _record in chunk) - _PARTITIONS
        yield chunk
