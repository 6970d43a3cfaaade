"""Splitting a run on a real broker: it goes on with other partitions, and both ledgers close over every record."""

import json
import subprocess
from collections import Counter
from dataclasses import replace
from typing import Any

from rollstream.pipeline.audit.ledger import Ledger, ledger
from rollstream.pipeline.audit.verification import verify
from rollstream.topics.config import TopicsConfig
from tests.support.command_line import answer_of
from tests.support.runs import RealRun, rollout
from tests.support.waiting import eventually


def ran(run: RealRun, *words: str) -> "subprocess.CompletedProcess[str]":
    return answer_of(run.directory, *run.command(*words)[4:])


def split(run: RealRun, into: str, partitions: int) -> Any:
    found = ran(run, "split", "--into", into, "--partitions", str(partitions), "--json")
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


def successor(run: RealRun, name: str, partitions: int) -> RealRun:
    return replace(run, name=name, topics=TopicsConfig(partitions=partitions))


def settled(run: RealRun, **expected: object) -> Ledger:
    """The ledger, once everything is read and it is as expected."""

    def now() -> Ledger | None:
        book = ledger(run.kafka, run.name)
        same = all(getattr(book, name) == value for name, value in expected.items())
        return book if same and not book.unread else None

    book = eventually(now, 120, f"a ledger with {expected}")
    assert book is not None
    assert book.balanced, book.problems
    return book


def batched(run: RealRun) -> Counter[str]:
    return Counter(uid for batch in run.read("batches") for uid in batch.uids)  # type: ignore[attr-defined]


def test_a_run_with_open_groups_goes_on_with_other_partitions_and_both_ledgers_close(real_run: RealRun) -> None:
    run = real_run
    run.topics = TopicsConfig(partitions=4)
    run.prepare()
    process = run.start("group")
    run.send(rollout(f"x{example}", member) for example in range(40) for member in range(4 if example % 2 else 2))
    eventually(lambda: sum(batched(run).values()) == 80, 120, "whole groups in batches")

    seven = split(run, f"{run.name}-7", 7)
    assert process.wait(60) == 0
    assert seven["moved"] == 40
    again = run.start("group")
    assert again.wait(60) == 2
    assert f"start this with --run {run.name}-7" in run.log_of(again)
    old = ledger(run.kafka, run.name)
    assert old.balanced, old.problems
    assert (old.batched, old.moved, old.in_flight, old.unread) == (80, 40, 0, 0)
    assert verify(run.kafka, run.name).mismatches == []

    wide = successor(run, f"{run.name}-7", 7)
    wide.start("group")
    wide.send(rollout(f"x{example}", member) for example in range(0, 20, 2) for member in (2, 3))
    book = settled(wide, batched=40)
    assert (book.in_flight, book.predecessor["moved"]) == (20, 40)
    assert verify(run.kafka, wide.name).mismatches == []

    two = split(wide, f"{run.name}-2", 2)
    assert two["moved"] == 20
    narrow = successor(run, f"{run.name}-2", 2)
    narrow.start("group", "--ordinal", "1")
    narrow.send(rollout(f"x{example}", member) for example in range(20, 40, 2) for member in (2, 3))
    settled(narrow, batched=40)
    settled(wide, batched=40, moved=20)
    assert verify(run.kafka, narrow.name).mismatches == []
    every = batched(run) + batched(wide) + batched(narrow)
    assert every == Counter(f"x{example}-{member}" for example in range(40) for member in range(4))
