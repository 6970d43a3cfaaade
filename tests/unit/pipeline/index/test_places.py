"""An index of places reads from undecoded records what decoding would give."""

import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import sqlite3
from contextlib import closing
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.consumers.grouping.testing import example_rollout
from rollstream.pipeline.index import sqlite_files
from rollstream.pipeline.index.places import finished_spans
from rollstream.topics.errors import RecordError
from rollstream.topics.records import FinishedOffsets
from rollstream.topics.records.fates import BATCHED, CONTROL, DROPPED
from rollstream.topics.records.journal import to_ranges
from rollstream.topics.wire.codec import decode, encode, framed_for_registry, leading_text, schemas
from tests.support.index_logs import ListedLog, MadeRun, indexed

TABLES = ("places", "finished", "journals", "entries", "steps", "uses", "policies")


def test_every_schema_of_a_rollout_begins_with_its_uid() -> None:
    folder = resources.files("rollstream.topics").joinpath("schemas")
    for schema in schemas()["Rollout"]:
        source = json.loads(folder.joinpath(f"rollout.v{schema.version}.avsc").read_text(encoding="utf-8"))
        assert (source["fields"][0]["name"], source["fields"][0]["type"]) == ("uid", "string")


@given(st.text(max_size=300), st.booleans())
def test_the_leading_text_of_a_rollout_is_its_uid(uid: str, in_registry: bool) -> None:
    value = encode(example_rollout(uid, 1.0, tokens=np.arange(3, dtype="<i4")))
    if in_registry:
        value = framed_for_registry(value, 7)
    assert leading_text(value).decode() == decode(value).uid == uid


@given(st.binary(max_size=40))
def test_a_frame_that_ends_early_is_refused_and_other_bytes_end_no_reader(rest: bytes) -> None:
    frame = encode(example_rollout("a name", 1.0))[:10]
    with contextlib.suppress(RecordError):
        assert leading_text(frame + rest) in rest
    for cut in range(10, 10 + 1 + len("a name")):
        with pytest.raises(RecordError, match="ends within its first field"):
            leading_text(encode(example_rollout("a name", 1.0))[:cut])


@given(st.dictionaries(st.integers(0, 60), st.sampled_from([BATCHED, CONTROL, DROPPED])))
def test_spans_hold_each_finished_offset_once_whatever_its_fate(fates: dict[int, str]) -> None:
    finished = [
        FinishedOffsets(fate=fate, runs=to_ranges(offset for offset, its in fates.items() if its == fate))
        for fate in sorted(set(fates.values()))
    ]
    spans = finished_spans(finished)
    assert [offset for first, last in spans for offset in range(first, last + 1)] == sorted(fates)
    assert all(last + 1 < first for (_, last), (first, _) in itertools.pairwise(spans))


def fill_until_killed(directory: Path, transactions: int) -> None:
    """Add places to an index; kill -9 before the n-th transaction that writes records is committed."""
    left = transactions

    def trace(statement: str) -> None:
        nonlocal left
        left -= statement.startswith("insert into positions")
        if statement == "commit" and left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    create = sqlite_files.create

    def traced(*arguments: Any) -> sqlite3.Connection:
        db = create(*arguments)
        db.set_trace_callback(trace)
        return db

    sqlite_files.create = traced
    with indexed(directory, log(), commit_records=5):
        pass


def log() -> ListedLog:
    run = MadeRun(groups=2)
    return ListedLog([record for _ in range(3) for record in run.chunk()], lambda: 5)


def test_an_index_whose_process_is_killed_while_it_fills_it_goes_on_where_it_committed(tmp_path: Path) -> None:
    starting = multiprocessing.get_context("spawn")
    for transactions in (1, 2, 3):
        child = starting.Process(target=fill_until_killed, args=(tmp_path / "killed", transactions))
        child.start()
        child.join(300)
        assert child.exitcode == -signal.SIGKILL
    contents = []
    for directory in (tmp_path / "killed", tmp_path / "whole"):
        with indexed(directory, log()), closing(sqlite_files.reader(directory / "index.sqlite")) as db:
            contents.append([db.execute(f"select * from {table}").fetchall() for table in TABLES])
    assert contents[0] == contents[1]
    assert all(rows for rows, table in zip(contents[0], TABLES, strict=True) if table != "policies")
