"""A wide run: 64 partitions, 8 grouping processes and 200 workers on three brokers, each process restarted in turn."""

import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.infra.broker.cluster import LocalCluster
from rollstream.infra.config import BrokerConfig
from rollstream.topics.config import KafkaConfig, TopicsConfig
from tests.faults.groupers import Supervised
from tests.faults.many_producers import ManyProducers
from tests.faults.promises import assert_promises
from tests.support.runs import RealRun
from tests.support.settled import settled

PARTITIONS, PROCESSES, WORKERS, BROKERS = 64, 8, 200, 3
BETWEEN = 200
"""Rollouts between two restarts."""
SESSION = {"broker.session.timeout.ms": "9000"}
"""Kafka's default. With the shorter one of local brokers, a busy machine fences brokers of so many partitions."""


@pytest.fixture
def wide_run(run_name: str, tmp_path: Path) -> Iterator[tuple[LocalCluster, RealRun]]:
    """Three copies of every topic, two of them in step; a reader of batches has 64 partitions to read from."""
    config = BrokerConfig(properties=SESSION)
    with LocalCluster.start(tmp_path / "cluster", BROKERS, config=config, bound_to_parent=True) as cluster:
        run = RealRun(
            KafkaConfig(bootstrap_servers=cluster.bootstrap_servers),
            run_name,
            tmp_path,
            topics=TopicsConfig(partitions=PARTITIONS, replication_factor=BROKERS, min_insync_replicas=2),
            grouping=GroupingConfig(batch_rollouts=16, max_batch_age_s=2.0),
        )
        yield cluster, run.prepare()
        run.stop()
        for index in cluster.running:
            cluster.kill(index)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_process_and_every_broker_of_a_wide_run_is_restarted_and_nothing_is_lost_or_repeated(
    wide_run: tuple[LocalCluster, RealRun],
) -> None:
    cluster, run = wide_run
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    turns = [("grouper", ordinal) for ordinal in range(PROCESSES)] + [("broker", index) for index in range(BROKERS)]
    rng.shuffle(turns)
    # Half of each kind end in order, and the others crash.
    hard = {turn: number % 2 == 0 for kind in ("grouper", "broker") for number, turn in enumerate(_of(turns, kind))}
    # No learner takes part; one that did would have to let more versions lie between sampling and training.
    groupers = Supervised(run, range(PROCESSES), learner__max_policy_lag=1000)
    with ManyProducers(run, workers=WORKERS, threads=4, rollouts_per_s=100.0) as load:
        for turn in turns:
            load.await_more(BETWEEN)
            how = signal.SIGKILL if hard[turn] else signal.SIGTERM
            print(f"{turn[0]} {turn[1]} is restarted after {how.name}")
            if turn[0] == "grouper":
                groupers.restart(turn[1], how)
            else:
                if hard[turn]:
                    cluster.kill(turn[1])
                    load.await_more(BETWEEN // 2)
                cluster.restart(turn[1], timeout_s=180.0)
                cluster.await_in_sync(180.0)
            groupers.revive()
        load.await_more(BETWEEN)
    settled(run, 300, in_flight=0, meanwhile=groupers.revive)
    groupers.stop()
    audited = assert_promises(run)
    places = audited.places
    assert places["batched"] == load.written
    # A client that loses a broker may send a request again under a new epoch, although the broker had taken it; the
    # groups of such rollouts are whole already.
    again = places["dropped:late"] + places["dropped:duplicate_uid"]
    assert audited.produced - places["control"] == load.written + again


def _of(turns: list[tuple[str, int]], kind: str) -> list[tuple[str, int]]:
    return [turn for turn in turns if turn[0] == kind]
