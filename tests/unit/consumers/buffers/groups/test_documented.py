"""The page on the group store: its example, settings and snippet, and how much memory the index takes."""

import os
import re
import subprocess
import sys
import tracemalloc
from dataclasses import fields
from pathlib import Path
from typing import Any

from rollstream.consumers.buffers.groups.config import GroupStoreConfig
from rollstream.consumers.buffers.groups.group_files import group_id_of
from rollstream.consumers.buffers.groups.index import GroupEntry
from rollstream.consumers.buffers.storage.journal import write_journal
from rollstream.consumers.grouping.testing import example_rollout
from tests.support.group_stores import attempt, opened, uuid_of
from tests.support.pages import blocks, page, section
from tests.support.paths import ROOT


def test_the_example_runs_as_documented_and_counts_what_is_on_disk(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "rollstream.consumers.buffers.example_usage", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "batch 0: 32 examples" in done.stdout
    assert done.stdout.count("group problem-") == 12
    assert len(list((tmp_path / "sums").glob("part-*.parquet"))) == 12
    assert len(list((tmp_path / "sums" / "batches").glob("batch_*.parquet"))) == 2


def test_the_page_names_every_setting_with_its_default() -> None:
    groups = section(page("archive"), "Groups in a store")
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", groups, re.MULTILINE))
    shown = {f.name: f.default for f in fields(GroupStoreConfig)} | {
        "accept_policy_versions": "all",
        "capacity_groups": "50,000",
        "target_group_size": "8 by hand, declared from a log",
        "min_group_size": "2 by hand, declared from a log",
    }
    del shown["seed"]
    assert {name: cell.strip() for name, cell in rows.items()} == {
        name: f"{default:g}" if isinstance(default, float) else str(default) for name, default in shown.items()
    }


def test_the_snippet_of_the_page_keeps_rollouts_and_makes_a_batch(tmp_path: Path) -> None:
    snippet = blocks(section(page("archive"), "The store of groups and batches"), "python")[0]
    namespace: dict[str, Any] = {}
    exec(compile(snippet, "docs/archive.md", "exec"), namespace)
    attempts = [attempt(n, example, environment="math") for example in "abcd" for n in range(8)]
    assert namespace["keep"](attempts, tmp_path) is not None
    assert len(list((tmp_path / "math").glob("part-*.parquet"))) == 4


def test_the_index_of_stored_groups_takes_a_kilobyte_each_and_knows_every_uid(
    tmp_path: Path,
) -> None:
    directory, count = tmp_path / "env", 4_000
    directory.mkdir()
    entries = []
    for n in range(count):
        uids = [f"{n:028x}-{m:03}" for m in range(8)]
        group_id = group_id_of("env", str(n), 0, uids)
        name = f"part-{uuid_of(group_id)}.parquet"
        (directory / name).touch()
        entries.append(GroupEntry(name, group_id, str(n), 0, tuple(uids)))
    write_journal(directory / "groups.journal", *entries)
    tracemalloc.start()
    buffer = opened(tmp_path)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert buffer.size() == count
    assert held / count < 1_100, "as objects it was 2,000 bytes"
    for n in range(0, count, 100):
        assert not buffer.add_rollout(example_rollout(f"{n:028x}-{n % 8:03}"))
        assert buffer.add_rollout(example_rollout(f"{n:028x}-009", example_id=str(n)))
        assert not buffer.add_rollout(example_rollout(f"{n:028x}-009", example_id=str(n)))
