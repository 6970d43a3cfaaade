"""Faults on a real broker, under load: whatever is killed, stopped or sent, every rollout ends in one place, once."""

import os
import random
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from confluent_kafka import ConsumerGroupState, KafkaException

from rollstream.consumers.grouping.process.grouping_process import GroupingProcess
from rollstream.infra.broker.broker import LocalBroker
from rollstream.infra.broker.cluster import LocalCluster
from rollstream.pipeline.audit.ledger import ledger
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka import clients, hanging_transactions
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.transactions import transactional_id
from rollstream.topics.wire.keys import encode_key
from tests.faults.conftest import SESSION_S, make_run
from tests.faults.groupers import TRANSACTION_S, Supervised, await_logged, await_restored, grouper
from tests.faults.load import Load
from tests.faults.promises import assert_promises, stop
from tests.support.rounds import rounds
from tests.support.runs import RealRun, rollout
from tests.support.settled import settled
from tests.support.waiting import eventually

SEED = 20
ALL = '"event": "assigned", "partitions": [0, 1, 2, 3]'


@contextmanager
def taking_all_partitions(run: RealRun, process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Wait, after the block, until `process` has got every partition."""
    before = run.log_of(process).count(ALL)
    yield
    eventually(lambda: run.log_of(process).count(ALL) > before, 60, f"every partition assigned to {process.pid}")


# ---------------------------------------------------------------------- processes


def kill_at_random(run: RealRun, kills: int, seed: int, protocol: str) -> None:
    """Two groupers under load: again and again, one of them is killed at a random moment and started again."""
    print(f"seed {seed}, group protocol {protocol}")
    rng = random.Random(seed)
    run.prepare()
    running = {ordinal: grouper(run, ordinal, group_protocol=protocol) for ordinal in (0, 1)}
    with Load(run, seed) as load:
        await_restored(run, *running.values())
        for _ in range(kills):
            ordinal = rng.choice((0, 1))
            # Half of the kills come while it starts, restores or joins, the other half while it works.
            if rng.random() < 0.5:
                await_logged(run, running[ordinal], '"event": "batch"')
            load.await_more(rng.randrange(10, 150))
            running[ordinal].send_signal(signal.SIGKILL)
            running[ordinal].wait()
            running[ordinal] = grouper(run, ordinal, group_protocol=protocol)
    settled(run, 150, in_flight=0)
    stop(*running.values())
    assert_promises(run, load)


@pytest.mark.long
@pytest.mark.timeout(rounds(1800))
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_killing_groupers_again_and_again_loses_and_repeats_nothing(fault_run: RealRun, protocol: str) -> None:
    kill_at_random(fault_run, rounds(7), random.randrange(2**32), protocol)


@pytest.mark.long
def test_two_groupers_become_four_become_one_under_load(fault_run: RealRun) -> None:
    run = fault_run.prepare()
    first = [grouper(run, ordinal) for ordinal in (0, 1)]
    with Load(run, SEED) as load:
        await_restored(run, *first)
        more = [grouper(run, ordinal) for ordinal in (2, 3)]
        await_restored(run, *more)
        load.await_more(50)
        with taking_all_partitions(run, first[0]):
            stop(first[1], *more)
        load.await_more(50)
    settled(run, 150, in_flight=0)
    stop(first[0])
    assert_promises(run, load)


@pytest.mark.long
def test_a_grouper_stopped_past_its_session_is_fenced_by_its_replacement(fault_run: RealRun) -> None:
    run = fault_run.prepare()
    zombie, other = grouper(run, 0), grouper(run, 1)
    with Load(run, SEED) as load:
        await_restored(run, zombie, other)
        await_logged(run, zombie, '"event": "batch"')
        # The session of the zombie ends, the other takes over, and somebody starts a replacement.
        with taking_all_partitions(run, other):
            zombie.send_signal(signal.SIGSTOP)
        replacement = grouper(run, 0)
        await_restored(run, replacement)
        load.await_more(50)
        zombie.send_signal(signal.SIGCONT)
        assert zombie.wait(300) == 3
        last = run.log_of(zombie).strip().splitlines()[-1]
        assert last.startswith("rollstream: ")
        assert "only one" in last
        assert f"{run.name}/grouper/0" in last
    settled(run, 150, in_flight=0)
    stop(replacement, other)
    assert_promises(run, load)


STALLING = """
import os, signal, sys, threading
from rollstream.topics.kafka import clients

class Stalling:
    "A producer that stops its process before its first commit, which then never comes back."
    def __init__(self, producer):
        self._producer = producer
    def __getattr__(self, name):
        return getattr(self._producer, name)
    def __len__(self):
        return len(self._producer)
    def commit_transaction(self, *arguments):
        os.kill(os.getpid(), signal.SIGSTOP)
        threading.Event().wait()

build = clients.transactional_producer
made = []

def first_stalls(kafka, name, **settings):
    producer = build(kafka, name, **settings)
    if "/grouper/" not in name or made:
        return producer
    made.append(name)
    return Stalling(producer)

clients.transactional_producer = first_stalls
from rollstream.pipeline.command_line.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.long
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_grouper_that_wakes_up_in_a_call_that_never_ends_leaves_its_replacement_alone(
    fault_run: RealRun, protocol: str
) -> None:
    run = fault_run.prepare()
    run.send(rollout(f"x{example}", member) for example in range(16) for member in range(4))
    settings = {"session_timeout_s": SESSION_S, "transaction_timeout_s": TRANSACTION_S, "group_protocol": protocol}
    zombie = run.start("group", script=STALLING, **{f"kafka__{name}": value for name, value in settings.items()})
    options = os.WSTOPPED | os.WNOHANG
    eventually(lambda: os.waitid(os.P_PID, zombie.pid, options) is not None, 60, "the process stops itself")
    replacement = grouper(run, 0, **settings)
    await_logged(run, replacement, '"event": "batch"')
    zombie.send_signal(signal.SIGCONT)
    assert zombie.wait(300) == 3, run.log_of(zombie)
    last = run.log_of(zombie).strip().splitlines()[-1]
    assert f"another process has since started as {run.name}/grouper/0" in last
    run.send(rollout(f"y{example}", member) for example in range(16) for member in range(4))
    settled(run, batched=128)
    assert replacement.poll() is None
    stop(replacement)
    assert ledger(run.kafka, run.name).balanced


@pytest.mark.long
def test_a_grouper_stopped_past_its_session_and_not_replaced_doubles_nothing(fault_run: RealRun) -> None:
    run = fault_run.prepare()
    zombie, other = grouper(run, 0), grouper(run, 1)
    with Load(run, SEED) as load:
        await_restored(run, zombie, other)
        await_logged(run, zombie, '"event": "batch"')
        with taking_all_partitions(run, other):
            zombie.send_signal(signal.SIGSTOP)
        load.await_more(50)
        before = run.log_of(zombie).count('"event": "task_restored"')
        zombie.send_signal(signal.SIGCONT)
        # If it was stopped between transactions, it takes part again; if within one, that has timed out, and it ends.
        eventually(
            lambda: zombie.poll() == 3 or run.log_of(zombie).count('"event": "task_restored"') > before,
            60,
            "the one that was stopped takes part again, or ends",
        )
        load.await_more(50)
    settled(run, 150, in_flight=0)
    stop(*(process for process in (zombie, other) if process.poll() is None))
    assert_promises(run, load)


# ---------------------------------------------------------------------- rebalances


class Interposed:
    """A transactional producer that lets something happen once, between a transaction's records and its offsets."""

    def __init__(self, producer: Any, meanwhile: Callable[[], None]) -> None:
        self._producer = producer
        self._meanwhile: Callable[[], None] | None = meanwhile
        self.happened = threading.Event()
        self.errors: list[str] = []
        """Names of what sending offsets raised."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def __len__(self) -> int:
        return len(self._producer)

    def send_offsets_to_transaction(self, *arguments: Any) -> None:
        meanwhile, self._meanwhile = self._meanwhile, None
        if meanwhile is not None:
            meanwhile()
            self.happened.set()
        try:
            self._producer.send_offsets_to_transaction(*arguments)
        except KafkaException as error:
            self.errors.append(error.args[0].name())
            raise


@contextmanager
def grouper_in_here(run: RealRun, meanwhile: Callable[[], None], **client: str) -> Iterator[Interposed]:
    """Grouper 0 as a thread of this process, whose first transaction is interrupted by `meanwhile`."""
    kafka = replace(
        run.kafka, session_timeout_s=SESSION_S, transaction_timeout_s=60.0, client={**run.kafka.client, **client}
    )
    build, made = clients.transactional_producer, list[Interposed]()

    def interpose(kafka: KafkaConfig, name: str, **settings: Any) -> Any:
        producer = build(kafka, name, **settings)
        if made or name != transactional_id(run.name, "grouper", 0):
            return producer
        made.append(Interposed(producer, meanwhile))
        return made[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clients, "transactional_producer", interpose)
        process = GroupingProcess(kafka, run.name, run.grouping, run.grouper, 0, lambda: None)
    [interposed] = made
    stopping, failures = threading.Event(), []

    def work() -> None:
        try:
            process.run(stopping)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work, name="grouper-0")
    thread.start()
    try:
        yield interposed
    finally:
        stopping.set()
        thread.join(300)
    assert not thread.is_alive()
    assert failures == []


@pytest.mark.long
def test_a_rebalance_that_begins_in_the_middle_of_a_commit_waits_for_it(fault_run: RealRun) -> None:
    run = fault_run.prepare()
    joined: list[subprocess.Popen[bytes]] = []
    admin = clients.admin(run.kafka)
    group = run.grouper.group_id(run.name)

    def join() -> None:
        joined.append(grouper(run, 1))

        def rebalancing() -> bool:
            description = admin.describe_consumer_groups([group])[group].result(300)
            return bool(description.state == ConsumerGroupState.PREPARING_REBALANCING)

        eventually(rebalancing, 60, "the group prepares to rebalance")

    with Load(run, SEED) as load:
        with grouper_in_here(run, join) as interposed:
            assert interposed.happened.wait(300)
            await_restored(run, *joined)
            load.await_more(50)
        assert interposed.errors == []
    settled(run, 150, in_flight=0)
    stop(*joined)
    assert_promises(run, load)


EXPELLED_SOON = {"max.poll.interval.ms": "2500", "session.timeout.ms": "2000"}
EXPELS_OTHERS_SOON = {"client.max.poll.interval.ms": 8000, "client.session.timeout.ms": 6000}
"""Settings of the member that comes: the coordinator waits for the others as long as the most patient one would."""


@pytest.mark.long
def test_a_grouper_expelled_in_the_middle_of_a_commit_aborts_and_restores(fault_run: RealRun) -> None:
    run = fault_run.prepare()
    taking_over: list[subprocess.Popen[bytes]] = []

    def lose_everything() -> None:
        taking_over.append(grouper(run, 1, **EXPELS_OTHERS_SOON))
        await_logged(run, taking_over[0], ALL)

    with Load(run, SEED) as load:
        with grouper_in_here(run, lose_everything, **EXPELLED_SOON) as interposed:
            assert interposed.happened.wait(300)
            # The expelled member comes back, and the partitions are shared.
            await_logged(run, taking_over[0], '"event": "revoked"')
            load.await_more(50)
        assert interposed.errors
        assert set(interposed.errors) <= {"UNKNOWN_MEMBER_ID", "ILLEGAL_GENERATION", "FENCED_INSTANCE_ID"}
    settled(run, 150, in_flight=0)
    stop(*taking_over)
    assert_promises(run, load)


# ---------------------------------------------------------------------- brokers


def kill_the_broker(run: RealRun, broker: LocalBroker, times: int) -> None:
    groupers = Supervised(run.prepare())
    rng = random.Random(SEED)
    with Load(run, SEED) as load:
        for number in range(times):
            load.await_more(rng.randrange(50, 150))
            print(f"kill {number + 1} of the broker")
            broker.kill()
            broker.restart()
            load.await_more(100)
            groupers.revive()
    settled(run, 150, in_flight=0, meanwhile=groupers.revive)
    groupers.stop()
    assert_promises(run, load, cut_off=True)
    nothing_hangs(run)


def nothing_hangs(run: RealRun) -> None:
    """Wait until no record of the run, nor an offset of its group, waits for the end of a transaction."""
    places = hanging_transactions.places_of(run.kafka, run.name)
    eventually(
        lambda: not hanging_transactions.open_transactions(run.kafka, places),
        60,
        "no transaction stands open",
        every_s=1.0,
    )


@pytest.mark.long
@pytest.mark.timeout(rounds(1800))
def test_killing_the_broker_again_and_again_loses_and_repeats_nothing(
    fault_run: RealRun, breakable: LocalBroker
) -> None:
    kill_the_broker(fault_run, breakable, rounds(8))


@pytest.fixture
def cluster_run(run_name: str, tmp_path: Path) -> Iterator[tuple[LocalCluster, RealRun]]:
    """Three nodes, three copies of every topic, two of them in step, and a run on them."""
    with LocalCluster.start(tmp_path / "cluster", 3, bound_to_parent=True) as cluster:
        run = make_run(cluster.bootstrap_servers, run_name, tmp_path, replication_factor=3, min_insync_replicas=2)
        yield cluster, run.prepare()
        run.stop()
        # Nobody needs an orderly end of the nodes.
        for index in cluster.running:
            cluster.kill(index)


def lose_nodes(
    cluster: LocalCluster, run: RealRun, choose: list[Callable[[], int]], ordinals: Sequence[int] = (0, 1)
) -> None:
    """One node after another is killed under load, started again, and given time to catch up."""
    groupers = Supervised(run, ordinals)
    with Load(run, SEED) as load:
        for choice in choose:
            load.await_more(100)
            lost = choice()
            print(f"node {lost} is killed")
            cluster.kill(lost)
            load.await_more(200)
            cluster.restart(lost)
            cluster.await_in_sync()
            groupers.revive()
    settled(run, 150, in_flight=0, meanwhile=groupers.revive)
    groupers.stop()
    assert_promises(run, load, cut_off=True)


@pytest.mark.long
def test_losing_the_leader_of_the_index_that_coordinates_transactions_costs_nothing(
    cluster_run: tuple[LocalCluster, RealRun],
) -> None:
    cluster, run = cluster_run
    leader = cluster.leader(run.topic("batch-index"))
    coordinated = (n for n in range(100) if cluster.transaction_coordinator(f"{run.name}/grouper/{n}") == leader)
    lose_nodes(cluster, run, [lambda: leader], ordinals=(next(coordinated), next(coordinated)))


@pytest.mark.long
def test_losing_leaders_and_coordinators_in_turn_costs_nothing(cluster_run: tuple[LocalCluster, RealRun]) -> None:
    cluster, run = cluster_run
    lose_nodes(
        cluster,
        run,
        [
            lambda: cluster.leader(run.topic("batch-index")),
            lambda: cluster.transaction_coordinator(f"{run.name}/grouper/0"),
            lambda: cluster.group_coordinator(run.grouper.group_id(run.name)),
            cluster.active_controller,
            lambda: cluster.leader(run.topic("rollouts"), 2),
        ],
    )


# ---------------------------------------------------------------------- input


@pytest.mark.long  # tests/broker/test_unreadable.py sends bombs, and the museum is killed
def test_poison_bombs_and_oversized_records_between_good_ones_stop_nobody(fault_run: RealRun) -> None:
    run = fault_run.prepare()
    process = grouper(run, 0)
    limit = run.kafka.max_record_bytes
    # zstd makes a few hundred bytes of millions of zeros, and the topic's limit is on what is sent.
    producer = clients.producer(run.kafka, **{"message.max.bytes": 100_000_000, "queue.buffering.max.kbytes": 400_000})
    key = encode_key("env", "x0")
    refused: list[str] = []

    def send(value: bytes) -> None:
        producer.produce(
            run.topic("rollouts"), value, key, on_delivery=lambda e, _: refused.append(e.name()) if e else None
        )
        assert producer.flush(120) == 0

    bombs = [bytes(8_000_000), bytes(limit + 1), bytes(64_000_000)]
    long_tokens = np.zeros(400_000, "<i4")
    oversized = [
        rollout(
            "huge",
            member,
            tokens=long_tokens,
            loss_mask=np.ones(len(long_tokens), bool),
            logprobs=np.zeros(len(long_tokens), "<f4"),
        )
        for member in range(4)
    ]
    with Load(run, SEED, rollouts_per_s=100) as load:
        for number, bomb in enumerate(bombs):
            load.await_more(20)
            send(bomb)
            run.send(oversized[number : number + 1])
        run.send(oversized[3:])
        # A value that does not compress is refused where it is produced; nothing of it is on the log.
        send(np.random.default_rng(SEED).bytes(limit + 1000))
        assert refused == ["MSG_SIZE_TOO_LARGE"]
        load.await_more(20)
    settled(run, 150, in_flight=0)
    stop(process)
    audited = assert_promises(run)
    assert audited.places["batched"] == load.rollouts
    assert audited.places["dead letter"] == load.poison + len(bombs)
    assert audited.places["dropped:too_large"] == len(oversized)
    letters = [m for m in read_to_end(run.kafka, run.topic("dead-letters")) if b"poison" not in (m.value or b"")]
    kept = [len(m.value) for m in letters if m.value is not None and len(m.value) > 100]
    digests = [dict(m.headers).get("rollstream.value.size_bytes") for m in letters if m.value is None]
    assert kept == [8_000_000]
    # A value larger than a record may be has a digest; one that no client decompresses has only its place on record.
    assert set(digests) == {b"%d" % (limit + 1), None}
