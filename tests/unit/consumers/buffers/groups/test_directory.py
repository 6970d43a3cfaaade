"""A group store's directory through restarts, kills, failed writes and damage: everything is in one place, once."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from rollstream.consumers.buffers.groups.store import ClosingReport
from rollstream.consumers.grouping.makers.batch_maker import FifoBatchMaker
from rollstream.consumers.grouping.testing import example_rollout
from rollstream.topics.errors import RecordError
from rollstream.topics.files.atomic_files import StoreError
from tests.support.group_stores import Clock, attempt, context, group, opened, seen, uuid_of
from tests.support.paths import ROOT


def test_closing_seals_what_is_large_enough_and_keeps_the_rest_for_the_next_time(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    buffer.add_rollouts([*group("a", size=5), *group("b", size=1)])
    assert buffer.close() == ClosingReport(sealed=1, kept=1)
    again = opened(tmp_path)
    assert [(stored.example_id, len(stored.rollouts)) for stored in again.groups()] == [("a", 5)]
    assert again.stats()["open_rollouts"] == 1
    again.add_rollouts(attempt(n, "b") for n in range(8))
    assert [len(stored.rollouts) for stored in again.groups()] == [5, 8]


def test_leaving_the_block_closes_the_store_also_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecordError), opened(tmp_path) as buffer:
        buffer.add_rollouts([*group(size=3), attempt(3, environment="other")])
    assert opened(tmp_path).size() == 1


def test_open_groups_continue_after_a_flush(tmp_path: Path) -> None:
    clock = Clock()
    buffer = opened(tmp_path, clock=clock)
    buffer.add_rollouts(group("a", size=3))
    buffer.add_rollout(attempt(0, "b"))
    clock.now += 31
    buffer.add_rollouts(group("c", size=4))
    buffer.flush()
    buffer.release()
    again = opened(tmp_path, clock=clock)
    assert buffer.stats() | {"added": 0, "sealed": 0} == again.stats() | {"added": 0, "sealed": 0}
    again.add_rollout(attempt(1, "b"))
    assert [stored.example_id for stored in again.groups()] == ["a", "b"], "b was overdue, and still is"
    clock.now += 30
    assert again.poll() == 1


def test_a_group_that_cannot_be_written_is_an_error_and_is_written_by_the_next_call(tmp_path: Path) -> None:
    buffer = opened(tmp_path, FifoBatchMaker(context()))
    buffer.add_rollouts(group(size=7))
    in_the_way = tmp_path / "env"
    in_the_way.rename(tmp_path / "aside")
    in_the_way.write_text("")
    with pytest.raises(StoreError, match="nothing was stored") as raised:
        buffer.add_rollout(attempt(7))
    assert isinstance(raised.value.__cause__, OSError)
    assert buffer.size() == 0
    assert buffer.stats()["held"] == 0, "nothing that is not stored is offered"
    with pytest.raises(StoreError):
        buffer.add_rollout(attempt(8))
    in_the_way.unlink()
    (tmp_path / "aside").rename(in_the_way)
    assert buffer.add_rollout(attempt(8)), "it was not in"
    assert [len(stored.rollouts) for stored in buffer.groups()] == [8]
    assert buffer.stats()["held"] == 8


def test_a_torn_or_missing_index_is_repaired_from_the_folder(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        for example in "abc":
            buffer.add_rollouts(group(example))
    index = tmp_path / "env" / "groups.journal"
    whole = index.read_bytes()
    for damaged in (whole[:-20], b"", b"{\n" + whole):
        index.write_bytes(damaged)
        with opened(tmp_path) as again:
            assert sorted(stored.example_id for stored in again.groups()) == ["a", "b", "c"]
            assert again.add_rollouts(group("c")) == 0
    index.unlink()
    assert opened(tmp_path).size() == 3
    next((tmp_path / "env").glob("part-*")).unlink()
    assert opened(tmp_path).size() == 2, "an index never names what is not there"


def test_an_invalid_file_of_a_group_is_named(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        buffer.add_rollouts(group())
    [path] = tmp_path.rglob("part-*")
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(StoreError, match=r"part-.*is damaged.*restore it"):
        list(opened(tmp_path).groups())
    path.write_bytes(b"")
    with pytest.raises(StoreError, match=r"part-.*is (damaged|not a valid file of a group).*restore it"):
        list(opened(tmp_path).groups())


def flips(whole: bytes, count: int) -> Iterator[bytes]:
    """The bytes with one bit flipped: at places drawn with a fixed seed, and in each of the last 64 bytes."""
    rng = np.random.default_rng(5)
    for bit in {*rng.integers(0, 8 * len(whole), count).tolist(), *range(8 * len(whole) - 512, 8 * len(whole))}:
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        yield bytes(damaged)


def test_every_flipped_bit_of_a_group_or_a_batch_is_a_store_error_that_names_the_file(tmp_path: Path) -> None:
    with opened(tmp_path, FifoBatchMaker(context())) as buffer:
        buffer.add_rollouts(group())
        batch_id = buffer.create_and_store_batch(8)
        assert batch_id is not None
        [part], [batch] = tmp_path.rglob("part-*"), tmp_path.rglob("batch_*")
        for path, read in (
            (part, lambda: buffer.read_group(buffer.group_ids()[0])),
            (batch, lambda: buffer.read_batch(batch_id)),
        ):
            whole = path.read_bytes()
            for damaged in flips(whole, 400):
                path.write_bytes(damaged)
                with pytest.raises(StoreError, match=f"(?s){path.name} is .*restore it from a copy"):
                    read()
            path.write_bytes(whole)
            read()


def test_pages_have_the_checksums_of_parquet(tmp_path: Path) -> None:
    opened(tmp_path, compression="none").add_rollouts(group())
    [path] = tmp_path.rglob("part-*")
    whole = bytearray(path.read_bytes())
    whole[whole.index(b"q-0-3")] ^= 1
    path.write_bytes(whole)
    with pytest.raises(OSError, match="CRC"):
        pq.read_table(path, page_checksum_verification=True)


def test_a_store_with_damaged_files_opens_and_counts_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path, FifoBatchMaker(context())) as buffer:
        for example in "abcd":
            buffer.add_rollouts(group(example))
        assert buffer.create_and_store_batch(8) is not None
    parts = {g.example_id: tmp_path / "env" / f"part-{uuid_of(g.group_id)}.parquet" for g in buffer.groups()}
    for path in (parts["b"], parts["c"], next(tmp_path.rglob("batch_*"))):
        path.write_bytes(path.read_bytes()[:-9])
    again = opened(tmp_path, FifoBatchMaker(context()))
    assert (again.stats()["damaged"], again.stats()["held"]) == (3, 16), "a is offered again, b and c cannot be"
    assert caplog.text.count("stored_file_damaged") == 3
    groups, collected = again.groups(), []
    for _ in range(4):
        try:
            collected.append(next(groups).example_id)
        except StoreError:
            collected.append("damaged")
    assert collected == ["a", "damaged", "damaged", "d"]
    again.close()
    (tmp_path / "env" / "groups.journal").unlink()
    mended = opened(tmp_path)
    assert sorted(g.example_id for g in mended.groups()) == ["a", "d"]
    assert mended.add_rollouts(group("b")) == 8, "they can be put in again"
    assert mended.size() == 3


def test_every_rollout_is_in_one_place_while_many_threads_add_poll_and_draw(tmp_path: Path) -> None:
    buffer = opened(tmp_path, FifoBatchMaker(context()), target_group_size=4)
    drawn: list[str] = []
    errors: list[BaseException] = []

    def add(thread: int) -> None:
        try:
            for n in range(15):
                buffer.add_rollouts(attempt(thread, f"{n + i}") for i in range(2))
                buffer.poll()
        except BaseException as error:
            errors.append(error)

    def draw() -> None:
        try:
            while any(thread.is_alive() for thread in adding):
                for row in buffer.sample(4) or ():
                    assert row.tokens.tolist() == [1, 2, 3, 4]
                    drawn.append(row.source.uid)
        except BaseException as error:
            errors.append(error)

    adding = [threading.Thread(target=add, args=(i,)) for i in range(8)]
    drawing = [threading.Thread(target=draw) for _ in range(2)]
    for thread in [*adding, *drawing]:
        thread.start()
    for thread in [*adding, *drawing]:
        thread.join(300)
    assert errors == []
    while rows := buffer.sample(4):
        drawn += [row.source.uid for row in rows]
    stored = [r.uid for g in seen(tmp_path).groups() for r in g.rollouts]
    assert len(stored) == len(set(stored)) == buffer.stats()["added"] == 8 * 16
    assert sorted(drawn) == sorted(stored)


CHILD = """
import sys
from rollstream.consumers.buffers.groups.config import GroupStoreConfig
from rollstream.consumers.buffers.groups.store import GroupReplayBuffer
from rollstream.consumers.grouping.makers.batch_maker import FifoBatchMaker, MakerContext
from rollstream.consumers.grouping.testing import example_rollout

maker = FifoBatchMaker(MakerContext(partition=0, seed=0, batch_bytes=2**30))
buffer = GroupReplayBuffer(sys.argv[1], "env", GroupStoreConfig(target_group_size=2), batch_maker=maker)
start = buffer.size()
n = start
while True:
    buffer.add_rollouts(example_rollout(f"{n}-{m}", float(m), example_id=str(n)) for m in range(2))
    print("group", buffer.group_ids()[-1], flush=True)
    if n % 3 == 0:
        print("batch", buffer.create_and_store_batch(4), flush=True)
    if n % 5 == 0:
        buffer.add_rollout(example_rollout(f"open-{n}", example_id=f"open-{n}"))
        buffer.flush()
        print("open", f"open-{n}", flush=True)
    n += 1
"""


def test_kill_9_while_writing_leaves_nothing_torn_and_everything_that_was_acknowledged(tmp_path: Path) -> None:
    text: dict[str, list[str]] = {"group": [], "batch": [], "open": []}
    for lines in (5, 30):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        )
        assert child.stdout is not None
        for _ in range(lines):
            kind, what = child.stdout.readline().split()
            if what != "None":
                text[kind].append(what)
        child.send_signal(signal.SIGKILL)
        # Lines between the last one read and the end were acknowledged, too.
        for line in child.stdout.read().splitlines():
            if len(words := line.split()) == 2 and words[1] != "None":
                text[words[0]].append(words[1])
        child.wait()
        child.stdout.close()
        maker = FifoBatchMaker(context())
        buffer = opened(tmp_path, maker, target_group_size=2)
        assert set(text["group"]) <= set(buffer.group_ids())
        assert set(text["batch"]) <= set(buffer.batch_ids())
        stored = [r.uid for g in buffer.groups() for r in g.rollouts]
        delivered = [row.source.uid for b in buffer.batch_ids() for row in buffer.read_batch(b).examples]
        assert len(stored) == len(set(stored))
        assert len(delivered) == len(set(delivered))
        assert maker.held == len(stored) - len(delivered)
        assert all(not buffer.add_rollout(example_rollout(uid, example_id=uid)) for uid in text["open"])
        assert list(tmp_path.rglob("*.unfinished")) == []
        buffer.release()
