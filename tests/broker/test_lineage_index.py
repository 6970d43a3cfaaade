"""Lineage by an index of places says what reading the whole topics says, whatever happened to the index or the log."""

import argparse
import multiprocessing
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollstream.consumers.grouping.core.journal_splitting import split_record
from rollstream.consumers.grouping.core.task_state import initial_record
from rollstream.pipeline import sqlite_files
from rollstream.pipeline.audit.place_index import PlaceIndex
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.tools.lineage import lineage_trees
from rollstream.pipeline.tools.looked_up_run import LookedUpRun, index_file
from rollstream.pipeline.tools.run_view import IN_FLIGHT, SETTLED, UNREAD, Fate, RunView, SearchableRun
from rollstream.topics.codec import encode
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import RollstreamError
from rollstream.topics.fates import BATCHED, DROPPED
from rollstream.topics.kafka import provisioning, topic_admin
from rollstream.topics.keys import encode_key
from rollstream.topics.offset_ranges import to_ranges
from rollstream.topics.records import Drop, FinishedOffsets
from tests.support.command_line import answer_of
from tests.support.planted import Planted, plant
from tests.support.runs import RealRun, rollout

SUBJECTS = ("rollout", "offset", "batch", "step", "policy")


@pytest.fixture(scope="module")
def planted(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planted]:
    run = RealRun(KafkaConfig(bootstrap_servers=broker), "looked-up", tmp_path_factory.mktemp("run"))
    try:
        yield plant(run)
    finally:
        run.stop()


def answers(view: SearchableRun, questions: list[dict[str, Any]]) -> list[Any]:
    """The answer of lineage to each question, or the text of its error."""
    report: list[Any] = []
    for question in questions:
        args = argparse.Namespace(**dict.fromkeys(SUBJECTS))
        vars(args).update(question)
        try:
            report.append([tree.as_dict() for tree in lineage_trees(view, args)])
        except RollstreamError as error:
            report.append(str(error))
    return report


def questions_about(planted: Planted, every: int) -> list[dict[str, Any]]:
    """Records of `rollouts`, batches, steps and versions: those that are there, and some that are not.

    Questions about rollouts are about every `every`-th one.
    """
    run = planted.run
    bounds = topic_admin.bounds(run.kafka, run.topic("rollouts"))
    uids = {uid for batch in planted.batches for uid in batch.uids} | {planted.twice, *planted.slow, *planted.stale}
    return [
        *({"offset": f"{p}:{offset}"} for p, (_low, end) in bounds.items() for offset in range(0, end + every, every)),
        *({"rollout": uid} for uid in [*sorted(uids)[::every], planted.twice, "nobody", "cancelled-3"]),
        *({"batch": name} for name in sorted({*(batch.batch_id for batch in planted.batches), "9-9"})),
        *({"step": number} for number in range(3)),
        *({"policy": version} for version in range(8)),
    ]


def assert_both_say_the_same(planted: Planted, path: Path, every: int = 7) -> int:
    """Ask both forms everything; return how many records the index had to read before."""
    run, questions = planted.run, questions_about(planted, every)
    with RunView(run.kafka, run.name) as topics, PlaceIndex(run.kafka, run.name, path) as index:
        read = index.update()
        by_index = answers(LookedUpRun(index, topics), questions)
    with RunView(run.kafka, run.name) as whole:
        by_reading = answers(whole, questions)
    for question, ours, theirs in zip(questions, by_index, by_reading, strict=True):
        assert ours == theirs, question
    return read


@pytest.mark.long
def test_every_question_has_the_same_answer_in_both_forms(planted: Planted, tmp_path: Path) -> None:
    path = tmp_path / "places.sqlite"
    assert assert_both_say_the_same(planted, path, every=1) > 60
    assert assert_both_say_the_same(planted, path) == 0, "there was nothing new"


@pytest.mark.long
def test_an_index_goes_on_with_what_is_new(real_run: RealRun, tmp_path: Path) -> None:
    other = plant(real_run)
    path = tmp_path / "places.sqlite"
    before = assert_both_say_the_same(other, path)
    real_run.send(rollout("later", member) for member in range(3))
    assert assert_both_say_the_same(other, path) == 3 < before
    with RunView(real_run.kafka, real_run.name) as topics, PlaceIndex(real_run.kafka, real_run.name, path) as index:
        assert [
            tree["children"][-1]["name"] for tree in answers(LookedUpRun(index, topics), [{"rollout": "later-1"}])[0]
        ]

    # Delete from the beginning, as prune does; lineage with the index and without it must still agree.
    low = {
        name: {p: begin + (end - begin) // 2 for p, (begin, end) in bounds(real_run, name).items()}
        for name in ("rollouts", "journal", "batch-index", "batches")
    }
    topic_admin.delete_records(
        real_run.kafka, {(real_run.topic(name), p): to for name, places in low.items() for p, to in places.items()}
    )
    assert 0 < assert_both_say_the_same(other, path) < before
    assert assert_both_say_the_same(other, path) == 0

    # A topic that was created again is another one, whatever it holds.
    assert topic_admin.delete_topics(real_run.kafka, [real_run.topic("steps")]) == {}
    provisioning.apply(real_run.kafka, real_run.topics, real_run.name)
    assert assert_both_say_the_same(other, path) > 3
    with closing(sqlite_files.reader(path)) as db:
        assert db.execute("select count(*) from steps").fetchone() == (0,)


def test_both_forms_read_all_parts_of_a_large_transaction(real_run: RealRun, tmp_path: Path) -> None:
    run = real_run.prepare()
    drops = tuple(Drop(offset=offset, reason="late", detail=f"detail {offset}") for offset in range(4))
    first = initial_record(0, run.topics.partitions, "topic", run.grouping)
    finished = (FinishedOffsets(fate=DROPPED, runs=to_ranges(range(4))),)
    parts = split_record(replace(first, sequence=1, position=4, finished=finished, drops=drops), limit_bytes=100)
    assert len(parts) > 2
    for part in parts:
        run.send_bytes("journal", encode(part), encode_key(0), 0)
    with RunView(run.kafka, run.name) as topics, PlaceIndex(run.kafka, run.name, tmp_path / "places.sqlite") as index:
        index.update()
        by_index, by_reading = (view.fates(0, {1, 3}) for view in (LookedUpRun(index, topics), topics))
    assert by_index == by_reading == {offset: Fate(DROPPED, drops[offset], generation=0) for offset in (1, 3)}


def test_both_forms_know_what_was_in_flight_before_a_pruned_journal(real_run: RealRun, tmp_path: Path) -> None:
    run = real_run.prepare()
    first = initial_record(0, run.topics.partitions, "topic", run.grouping)
    waiting = to_ranges(range(1, 80, 2))
    parts = split_record(replace(first, sequence=9, begin=90, position=96, unfinished=waiting), limit_bytes=100)
    assert len(parts) > 2
    batched = (FinishedOffsets(fate=BATCHED, runs=to_ranges([3])),)
    after = replace(first, sequence=9 + len(parts), begin=96, position=99, finished=batched, snapshot=False)
    topic_admin.delete_records(run.kafka, {(run.topic("journal"), 0): bounds(run, "journal")[0][1]})
    for part in (*parts, after):
        run.send_bytes("journal", encode(part), encode_key(0), 0)
    with RunView(run.kafka, run.name) as topics, PlaceIndex(run.kafka, run.name, tmp_path / "places.sqlite") as index:
        index.update()
        wanted = {0, 1, 3, 90, 99}
        by_index, by_reading = (view.fates(0, wanted) for view in (LookedUpRun(index, topics), topics))
    assert by_index == by_reading
    assert {offset: fate.name for offset, fate in by_index.items()} == {
        0: SETTLED,
        1: IN_FLIGHT,
        3: BATCHED,
        90: IN_FLIGHT,
        99: UNREAD,
    }


def bounds(run: RealRun, name: str) -> dict[int, tuple[int, int]]:
    return topic_admin.bounds(run.kafka, run.topic(name))


def fill_until_killed(kafka: KafkaConfig, run: str, path: Path, transactions: int) -> None:
    """Fill the index; kill -9 before the n-th transaction that writes records is committed."""
    wrote, left = False, transactions

    def trace(statement: str) -> None:
        nonlocal wrote, left
        if statement.startswith("update positions"):
            wrote = True
        elif statement == "commit" and wrote:
            wrote, left = False, left - 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    with PlaceIndex(kafka, run, path, commit_records=5) as index:
        index.db.set_trace_callback(trace)
        index.update()


def test_an_index_whose_process_is_killed_while_it_fills_it_goes_on_where_it_committed(
    planted: Planted, tmp_path: Path
) -> None:
    path, run = tmp_path / "places.sqlite", planted.run
    with PlaceIndex(run.kafka, run.name, tmp_path / "whole.sqlite") as whole:
        everything = whole.update()
    starting = multiprocessing.get_context("spawn")
    for transactions in (1, 2, 5, 3):
        child = starting.Process(target=fill_until_killed, args=(run.kafka, run.name, path, transactions))
        child.start()
        child.join(300)
        assert child.exitcode == -signal.SIGKILL
    assert assert_both_say_the_same(planted, path) == everything - 5 * (0 + 1 + 4 + 2)


@pytest.mark.long
def test_a_damaged_index_is_thrown_away(planted: Planted, tmp_path: Path) -> None:
    path = tmp_path / "places.sqlite"
    read = assert_both_say_the_same(planted, path)
    path.write_bytes(b"no database at all" * 1000)
    assert assert_both_say_the_same(planted, path) == read
    with closing(sqlite_files.reader(path)) as db:
        (page,) = db.execute("select rootpage from sqlite_master where name = 'positions'").fetchone()
        (size,) = db.execute("pragma page_size").fetchone()
    with path.open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(os.urandom(size))
    assert assert_both_say_the_same(planted, path) == read


def test_commands_answer_by_the_index_as_users_start_them_and_several_at_once(planted: Planted) -> None:
    run, batch = planted.run, planted.batches[0]
    for words in (("lineage", "--rollout", batch.uids[0]), ("show", batch.uids[0]), ("lineage", "--policy", "6")):
        (index_file(RunConfig(run=run.name, data_dir=run.directory))).unlink(missing_ok=True)
        command = run.command(*words, "--json")
        both = [subprocess.Popen(command, stdout=subprocess.PIPE, cwd=run.directory) for _ in range(2)]
        actual = [process.communicate(timeout=300)[0] for process in both]
        assert [process.returncode for process in both] == [0, 0]
        whole = answer_of(run.directory, *run.command(*words, "--json", "--without-index")[4:])
        assert whole.returncode == 0, whole.stderr
        assert [text.decode() for text in actual] == [whole.stdout] * 2


def test_an_index_that_cannot_be_written_names_what_can_be_done(planted: Planted, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    words = ("lineage", "--offset", "0:0", "--set", f"data_dir={tmp_path / 'file'}")
    answer = answer_of(tmp_path, *words, "--run", planted.run.name, "-b", planted.run.kafka.bootstrap_servers)
    assert answer.returncode == 2
    assert "--without-index" in answer.stderr
