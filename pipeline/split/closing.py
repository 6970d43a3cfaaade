"""Closes a run: its roles stop, `rollouts` accepts no more records, and grouping reads all of them.

Until records are moved, the run can be reopened as if nothing had happened.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rollstream.consumers.grouping.process.bootstrap import committed_offsets
from rollstream.consumers.grouping.process.grouping_process import run_grouping
from rollstream.consumers.grouping.process.moving import committed_task
from rollstream.pipeline.audit.ledger.book import Ledger
from rollstream.pipeline.audit.ledger.calls import check_calls
from rollstream.pipeline.audit.ledger.hidden_records import HiddenRecords
from rollstream.pipeline.audit.ledger.trajectories import check_trajectories
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.run.draining import QuietProducers
from rollstream.pipeline.tools.exclusion_marks import newest, partition_configurations
from rollstream.topics.catalogue import topic_name
from rollstream.topics.codec import encode
from rollstream.topics.errors import DeadlineExceeded, StateRefused
from rollstream.topics.kafka import clients, closed_topics, topic_admin
from rollstream.topics.kafka.groups import members
from rollstream.topics.kafka.open_transactions import await_decided
from rollstream.topics.kafka.reader import ends_of_records, read_to_end
from rollstream.topics.kafka.sender import Delivery, Sender
from rollstream.topics.keys import encode_key
from rollstream.topics.logs import event
from rollstream.topics.paused_partitions import paused_partitions
from rollstream.topics.records import Mark
from rollstream.topics.signatures import MarkSigner

logger = logging.getLogger(__name__)
_ORDINAL = 1_000_000_000
"""Ordinal of the grouping process that reads a run to its end; no other process has it."""
_POLL_S = 0.1
_LOOK_S = 0.5
"""Time between checks that read records."""
_GRACE_S = 10.0
"""Least time that producers have to end; after that, the broker refuses their records."""
_NOTICE_S = 5.0
"""Time that a worker has to notice the split, and to report its end, in addition to worker.drain_timeout_s."""


def check_movable(config: RunConfig) -> None:
    """Raise StateRefused if a run has records that a split does not move (without labels, in open sessions, or
    trajectories), or if a partition is paused and cannot be read to its end."""
    kafka, run = config.kafka, config.run
    if paused := sorted(paused_partitions(kafka, run)):
        raise StateRefused(
            f"partition {paused[0]} of run {run} is paused; resume it (`rollstream role group resume {paused[0]} --run "
            f"{run}`), and split again"
        )
    book = Ledger()
    check_trajectories(kafka, run, config.labeling.group_id(run), HiddenRecords(kafka, run), book)
    check_calls(kafka, run, book)
    waiting = book.unlabelled.get("pending", 0) + book.unlabelled.get("undecided", 0)
    if waiting:
        raise StateRefused(
            f"{waiting} records of run {run} wait for labels, which are not moved; stop the workers, let `rollstream "
            f"label` label them, and split again"
        )
    if book.calls.get("open_sessions"):
        raise StateRefused(
            f"{book.calls['open_sessions']} sessions of run {run} are open, and their calls are not moved; let the "
            f"agents end them, or wait until the gateway cancels them, and split again"
        )
    if book.trajectories.get("records"):
        raise StateRefused(f"run {run} holds trajectories; runs of control tasks have no groups and cannot be split")


def close(config: RunConfig, wait_s: float) -> None:
    """Close a run whose split is on record. Safe to repeat.

    Raises DeadlineExceeded if a grouping process does not end, labels do not arrive, or a partition is not read within
    `wait_s`, and StateRefused if records that are not moved have arrived since the split began, or if the run does not
    stay closed.
    """
    kafka, run = config.kafka, config.run
    rollouts = topic_name(run, "rollouts")
    _await_quiet(config, wait_s)
    if closed_topics.is_closed(kafka, rollouts):
        closed_topics.reopen(kafka, rollouts)
    _await_members_gone(config, wait_s)
    _await_labels(config, wait_s)
    last = _drain_and_fence(config)
    await_decided(kafka, rollouts, "nothing was moved", wait_s)
    for message in read_to_end(kafka, rollouts, start=last):
        last[message.partition] = max(last[message.partition], message.offset)
    with _grouping(config) as failed:
        _await_read(config, last, failed, wait_s)
    _await_members_gone(config, wait_s)
    check_movable(config)
    for partition in range(len(last)):
        delivered = committed_task(kafka, run, config.grouper, partition).state.delivered
        if delivered:
            raise StateRefused(
                f"{len(delivered)} rollouts of rollouts[{partition}] are in a batch although their groups are not "
                f"complete: records arrived after the drain; stop the producers, and split again"
            )
    check_closed(config)


def reopen(config: RunConfig) -> None:
    """Let producers write to a run again."""
    closed_topics.reopen(config.kafka, topic_name(config.run, "rollouts"))


def close_again(config: RunConfig) -> None:
    """Close `rollouts` of a run whose records are being moved, if somebody has opened it. Safe to repeat."""
    topic = topic_name(config.run, "rollouts")
    if not closed_topics.is_closed(config.kafka, topic):
        partitions = topic_admin.partitions_of(config.kafka, topic)
        arrived = _arrived(config, partitions)
        _fence(config, partitions)
        event(logger, "records_not_moved", level=logging.WARNING, topic=topic, records=arrived)


def check_closed(config: RunConfig) -> None:
    """Raise StateRefused if `rollouts` accepts records again: they would be neither grouped nor moved."""
    kafka, topic = config.kafka, topic_name(config.run, "rollouts")
    if closed_topics.is_closed(kafka, topic):
        return
    arrived = _arrived(config, topic_admin.partitions_of(kafka, topic))
    raise StateRefused(
        f"{topic} accepts records again, because somebody has set its max.message.bytes back; {arrived} records have "
        f"arrived since it was closed, and are not moved. Annotate the KafkaTopic of {topic} with "
        f'strimzi.io/managed: "false" if Strimzi manages it, and split again'
    )


def _arrived(config: RunConfig, partitions: int) -> int:
    """Return the number of records of `rollouts` that grouping has not read."""
    topic = topic_name(config.run, "rollouts")
    committed = committed_offsets(config.kafka, config.grouper.group_id(config.run), topic, partitions)
    positions = {place.partition: place.offset for place in committed}
    return sum(1 for _record in read_to_end(config.kafka, topic, start=positions))


def _await_quiet(config: RunConfig, wait_s: float) -> None:
    """Wait until producers have ended, at most as long as workers may take to finish their groups.

    A producer that was killed, or that writes no metrics, does not show that it has ended.
    """
    most_s = max(_GRACE_S, config.worker.drain_timeout_s + _NOTICE_S)
    deadline = time.monotonic() + min(most_s, wait_s)
    quiet = QuietProducers(config, topics=("rollouts", "unlabelled"))
    while not quiet() and time.monotonic() < deadline:
        time.sleep(_LOOK_S)


def _await_members_gone(config: RunConfig, wait_s: float) -> None:
    group = config.grouper.group_id(config.run)
    deadline = time.monotonic() + wait_s
    while count := members(config.kafka, group):
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"{count} grouping processes of run {config.run} have not ended within {wait_s:g} s; stop them, "
                f"and split again"
            )
        time.sleep(_POLL_S)


def _await_labels(config: RunConfig, wait_s: float) -> None:
    """Wait until all records are labeled, because no label can be written once `rollouts` is closed."""
    deadline = time.monotonic() + wait_s
    while waiting := _waiting_for_labels(config):
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"{waiting} records of run {config.run} still wait for labels after {wait_s:g} s; start "
                f"`rollstream role label`, and split again"
            )
        time.sleep(_LOOK_S)


def _waiting_for_labels(config: RunConfig) -> int:
    """Return the number of offsets from the labelers' positions to the last record of each partition."""
    kafka, topic = config.kafka, topic_name(config.run, "unlabelled")
    bounds = topic_admin.bounds(kafka, topic)
    committed = committed_offsets(kafka, config.labeling.group_id(config.run), topic, len(bounds))
    positions = {place.partition: max(bounds[place.partition][0], place.offset) for place in committed}
    ends = ends_of_records(kafka, topic, positions)
    return sum(ends[partition] - position for partition, position in positions.items())


def _drain_and_fence(config: RunConfig) -> dict[int, int]:
    """Append a drain mark to every partition, close the topic, and return the offsets of the marks."""
    topic = topic_name(config.run, "rollouts")
    partitions = topic_admin.partitions_of(config.kafka, topic)
    at: dict[int, int] = {}

    def delivered(delivery: Delivery) -> None:
        at[delivery.partition] = delivery.offset

    drain, key = Mark(kind="drain", wall_time=time.time(), author="split"), encode_key("mark", "drain")
    signer = MarkSigner(config.grouper.signing_key)
    with Sender(clients.producer(config.kafka, **{"linger.ms": "0"}), remedy="split again") as sender:
        for partition in range(partitions):
            sender.send(topic, signer.encoded(drain, partition), key, partition=partition, on_delivery=delivered)
    _fence(config, partitions)
    return at


def _fence(config: RunConfig, partitions: int) -> None:
    probe = encode(Mark(kind="deadline", wall_time=time.time(), author="split"))
    topic = topic_name(config.run, "rollouts")
    closed_topics.close(config.kafka, topic, probe, encode_key("mark", "deadline"), partitions)


@contextmanager
def _grouping(config: RunConfig) -> Iterator[list[BaseException]]:
    """Run grouping in a thread of this process, and yield a list to which its error is added."""
    stop, failed = threading.Event(), list[BaseException]()
    kafka, run = config.kafka, config.run
    # Use the configuration on the log: any other would need a mark, which cannot be written to a closed topic.
    grouping = newest(partition_configurations(kafka, run, config.grouper))

    def work() -> None:
        try:
            run_grouping(kafka, run, grouping, config.grouper, _ORDINAL, stop)
        except BaseException as error:  # raised below, in the caller's thread
            failed.append(error)

    thread = threading.Thread(target=work, name="grouping")
    thread.start()
    try:
        yield failed
    finally:
        stop.set()
        thread.join()
    if failed:
        raise failed[0]


def _await_read(config: RunConfig, last: dict[int, int], failed: list[BaseException], wait_s: float) -> None:
    """Wait until the group has committed a position past the last record of every partition."""
    topic, group = topic_name(config.run, "rollouts"), config.grouper.group_id(config.run)
    deadline = time.monotonic() + wait_s
    while not failed:
        committed = committed_offsets(config.kafka, group, topic, len(last))
        behind = {place.partition: place.offset for place in committed if place.offset <= last[place.partition]}
        if not behind:
            return
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"partitions {sorted(behind)} of {topic} were not grouped to their ends within {wait_s:g} s; run this "
                f"again with a longer --wait"
            )
        time.sleep(_POLL_S)
