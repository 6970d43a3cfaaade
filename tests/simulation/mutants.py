"""Faulty versions of our code, and a faulty broker: each breaks a promise, and the judge has to see it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from rollstream.consumers.grouping.config import GrouperConfig
from rollstream.consumers.grouping.core.grouping_task import TaskCommit
from rollstream.consumers.grouping.process import restorer
from rollstream.consumers.grouping.process.committer import TransactionPublisher
from rollstream.consumers.grouping.process.task_manager import TaskManager
from rollstream.consumers.transactions import ExactlyOnce, OwnershipLost
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka.reader import Reader
from rollstream.topics.kafka.records import GroupPosition
from rollstream.topics.kafka.transactions import Decision, Transaction, decide
from tests.simulation.cluster import Cluster
from tests.simulation.schedule import RUN

Patch = pytest.MonkeyPatch


def sends_no_offsets(patch: Patch) -> None:
    """Outputs are committed, and the position is not."""
    write = TransactionPublisher._write

    def write_only(self: Any, transaction: Transaction, commits: Sequence[TaskCommit]) -> list[GroupPosition]:
        write(self, transaction, commits)
        return []

    patch.setattr(TransactionPublisher, "_write", write_only)


def sends_offsets_as_an_outsider(patch: Patch) -> None:
    """Offsets are sent without the member's name and generation, so that nothing fences a member that was expelled."""
    send = Transaction.send_offsets

    def send_offsets(self: Transaction, positions: Iterable[GroupPosition], member: Any) -> None:
        send(self, positions, type(member)(member.group))

    patch.setattr(Transaction, "send_offsets", send_offsets)


def writes_the_index_after_the_commit(patch: Patch) -> None:
    """The entries of the index follow in a transaction of their own."""
    write, publish = TransactionPublisher._send, ExactlyOnce._publish

    def send(self: Any, transaction: Transaction, topic: str, *more: Any) -> None:
        if topic == "batch-index":
            self.__dict__.setdefault("put_off", []).append((topic, *more))
        else:
            write(self, transaction, topic, *more)

    def publish_twice(self: Any, member: object, parts: Sequence[TaskCommit]) -> None:
        publish(self, member, parts)
        put_off, self.put_off = self.__dict__.get("put_off", []), []
        if put_off:
            with self._producer.transaction() as transaction:
                for entry in put_off:
                    write(self, transaction, *entry)

    patch.setattr(TransactionPublisher, "_send", send)
    patch.setattr(ExactlyOnce, "_publish", publish_twice)


def goes_on_after_an_abort(patch: Patch) -> None:
    """Tasks are not restored after a transaction was aborted for a rebalance."""
    patch.setattr(TaskManager, "_ownership_lost", lambda self, error: None)


def takes_unknown_for_done(patch: Patch) -> None:
    """A transaction whose outcome is not known counts as committed."""

    def renew(self: Any, reason: str) -> None:
        self._replace_producer()
        self.start_producer()

    patch.setattr(ExactlyOnce, "_renew", renew)


def takes_unknown_for_aborted(patch: Patch) -> None:
    """A transaction whose outcome is not known is sent again."""
    publish = ExactlyOnce._publish_as

    def publish_as(self: Any, member: object, parts: Sequence[TaskCommit]) -> None:
        try:
            publish(self, member, parts)
        except OwnershipLost as lost:
            if "renewed" not in str(lost):
                raise
            publish(self, member, parts)

    patch.setattr(ExactlyOnce, "_publish_as", publish_as)


def keeps_revoked_tasks(patch: Patch) -> None:
    """A suspended task goes on although another process committed meanwhile."""
    patch.setattr(TaskManager, "_last_journal", lambda self, partition: self._suspended[partition].journal_offset)


def resends_after_a_rebalance(patch: Patch) -> None:
    """A commit that a rebalance refused is sent again with the new generation."""

    def decided(error: Any, *, patient: bool = True) -> Decision:
        decision = decide(error, patient=patient)
        return Decision.RESEND if decision is Decision.RESTORE else decision

    publish = ExactlyOnce._publish

    def publish_as_now(self: Any, member: Any, parts: Sequence[TaskCommit]) -> None:
        publish(self, type(member)(member.group), parts)

    patch.setattr("rollstream.topics.kafka.transactions.decide", decided)
    patch.setattr(ExactlyOnce, "_publish", publish_as_now)


def restores_what_is_undecided(patch: Patch) -> None:
    """Restores read the journal's open transactions."""

    def reader(kafka: KafkaConfig, run: str, grouper: GrouperConfig) -> Reader:
        return Reader(kafka, isolation="read_uncommitted", fetch_wait_ms=10, group=grouper.group_id(run))

    patch.setattr(restorer, "reader_of_restores", reader)


def compares_no_epochs(cluster: Cluster) -> None:
    """A broker that lets every producer with a transactional id write, also the fenced ones."""
    cluster.transactions.fencing = False


def compares_no_generations(cluster: Cluster) -> None:
    """A broker that takes offsets from whoever sends them."""
    cluster.groups[f"{RUN}.grouper"].checking = False


BROKEN_BROKERS: tuple[Callable[[Cluster], None], ...] = (compares_no_epochs, compares_no_generations)
MUTANTS: tuple[Callable[[Patch], None], ...] = (
    sends_no_offsets,
    sends_offsets_as_an_outsider,
    writes_the_index_after_the_commit,
    goes_on_after_an_abort,
    takes_unknown_for_done,
    takes_unknown_for_aborted,
    keeps_revoked_tasks,
    resends_after_a_rebalance,
    restores_what_is_undecided,
)
