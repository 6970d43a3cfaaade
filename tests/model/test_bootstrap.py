"""Generation 0 and recovered offsets: written once, even if other processes try it too or wake up later."""

import os
import signal
import subprocess
import threading

import pytest

from rollstream.consumers.grouping.process.bootstrap import committed_offsets, initialise, recover
from rollstream.pipeline.audit.ledger import ledger
from rollstream.pipeline.audit.verification import verify
from rollstream.topics.errors import DeadlineExceeded, StateRefused
from rollstream.topics.kafka import provisioning
from rollstream.topics.kafka.open_transactions import undecided
from rollstream.topics.kafka.topic_admin import delete_records
from tests.support.runs import RealRun, rollout
from tests.support.waiting import eventually

PAUSING = """
import signal, sys, threading
from rollstream.topics.kafka import clients

class Pausing:
    "A producer that stops its process between sending offsets and the commit, once."
    def __init__(self, producer):
        self._producer, self._paused = producer, False
    def __getattr__(self, name):
        return getattr(self._producer, name)
    def __len__(self):
        return len(self._producer)
    def commit_transaction(self, *arguments):
        if not self._paused:
            self._paused = True
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # This thread goes no further.
        self._producer.commit_transaction(*arguments)

build = clients.transactional_producer
clients.transactional_producer = lambda *arguments, **settings: Pausing(build(*arguments, **settings))
from rollstream.pipeline.command_line.cli import main
sys.exit(main(sys.argv[1:]))
"""


def pausing_grouper(run: RealRun, **settings: object) -> subprocess.Popen[bytes]:
    """A grouping process that stops itself in its first transaction, before the commit; returned once it has."""
    process = run.start("group", script=PAUSING, **settings)
    options = os.WSTOPPED | os.WNOHANG
    eventually(lambda: os.waitid(os.P_PID, process.pid, options) is not None, 60, "the process stops itself")
    return process


def test_a_journal_without_its_records_is_named_and_not_lost_offsets(real_run: RealRun) -> None:
    run = real_run.prepare()
    delete_records(run.kafka, {(run.topic("journal"), 1): 1})
    with pytest.raises(StateRefused, match=r"has offsets, but journal has no records on partitions \[1\]"):
        initialise(run.kafka, run.name, run.grouping, run.grouper)


@pytest.mark.parametrize("_round", range(3))
def test_two_that_initialise_at_once_write_generation_0_once(real_run: RealRun, _round: int) -> None:
    run = real_run
    provisioning.apply(run.kafka, run.topics, run.name)
    both, results = threading.Barrier(2), []

    def work() -> None:
        both.wait(300)
        results.append(initialise(run.kafka, run.name, run.grouping, run.grouper))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert sorted(results) == [False, True]
    assert len(run.read("journal")) == run.topics.partitions


def test_topics_apply_twice_at_once_leaves_a_run_whose_books_close(real_run: RealRun) -> None:
    run = real_run
    applying = [run.start("topics", "apply") for _ in range(2)]
    assert [process.wait(300) for process in applying] == [0, 0], [run.log_of(process) for process in applying]
    assert len(run.read("journal")) == run.topics.partitions
    assert ledger(run.kafka, run.name).balanced


@pytest.mark.kafka  # a process that stops itself
def test_a_process_paused_before_its_commit_is_fenced_by_recover_and_doubles_nothing(real_run: RealRun) -> None:
    run = real_run.prepare()
    run.send(rollout(f"x{example}", member) for example in range(16) for member in range(4))
    zombie = pausing_grouper(run, kafka__transaction_timeout_s=60.0, kafka__session_timeout_s=2.0)
    assert undecided(run.kafka, run.topic("journal"))
    # A static member stays in the group until its session times out.
    positions = eventually(lambda: recover(run.kafka, run.name, run.grouper), 60, "the group to be without members")
    assert positions == {0: 0, 1: 0}
    assert undecided(run.kafka, run.topic("journal")) == {}
    zombie.send_signal(signal.SIGCONT)
    assert zombie.wait(300) == 2, run.log_of(zombie)
    assert run.read("batches") == []
    process = run.start("group")
    eventually(lambda: sum(len(b.uids) for b in run.read("batches")) >= 64, 60, "all rollouts batched")  # type: ignore[attr-defined]
    process.terminate()
    assert process.wait(300) == 0
    book = ledger(run.kafka, run.name)
    assert book.balanced, book.problems
    assert (book.batched, book.rollouts) == (64, 64)
    assert verify(run.kafka, run.name).mismatches == []


def test_recover_refuses_while_the_journal_is_not_decided_and_commits_nothing(real_run: RealRun) -> None:
    run = real_run.prepare()
    before = committed_offsets(run.kafka, run.grouper.group_id(run.name), run.topic("rollouts"), 2)
    with run.open_transaction("journal"):
        with pytest.raises(DeadlineExceeded, match=r"\.journal\[0\] from offset \d+ to \d+ .* end the process"):
            recover(run.kafka, run.name, run.grouper, patience_s=0.5)
        after = committed_offsets(run.kafka, run.grouper.group_id(run.name), run.topic("rollouts"), 2)
        assert [(tp.offset, tp.metadata) for tp in after] == [(tp.offset, tp.metadata) for tp in before]
