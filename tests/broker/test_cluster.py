"""Three nodes on this machine: acknowledged records survive any one of them, and stopping leaves no process."""

import json
import subprocess
from pathlib import Path

import pytest
from confluent_kafka.admin import NewTopic

from rollstream.infra.broker.broker import LocalBroker
from rollstream.infra.broker.cluster import LocalCluster
from rollstream.infra.broker.process_identity import identify, is_running
from rollstream.infra.config import BrokerConfig
from rollstream.topics.config import KafkaConfig, TopicsConfig
from rollstream.topics.errors import BrokerUnavailable, ConfigurationError
from rollstream.topics.kafka import clients, provisioning
from rollstream.topics.kafka.groups import group_positions
from rollstream.topics.kafka.reader import Reader, read_to_end
from rollstream.topics.kafka.records import GroupPosition
from rollstream.topics.kafka.topic_admin import group_names
from tests.broker.test_local_broker import command


def produce(kafka: KafkaConfig, topic: str, values: list[bytes]) -> None:
    """Produce with acks=all; each must be acknowledged."""
    refused = []
    producer = clients.producer(kafka)
    for value in values:
        producer.produce(topic, value, on_delivery=lambda error, _: refused.append(error) if error else None)
    assert producer.flush(120) == 0
    assert not refused


def values(kafka: KafkaConfig, topic: str) -> list[bytes | None]:
    return [message.value for message in read_to_end(kafka, topic)]


def processes_of(data: Path) -> list[str]:
    listed = subprocess.run(["ps", "-A", "-o", "pid=,command="], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if str(data) in line]


@pytest.mark.long  # In the short form, tests/faults checks grouping under such a loss.
def test_a_cluster_survives_the_loss_of_any_node_and_leaves_no_process(tmp_path: Path, run_name: str) -> None:
    with LocalCluster.start(tmp_path, 3, bound_to_parent=True) as cluster:
        kafka = KafkaConfig(bootstrap_servers=cluster.bootstrap_servers)
        client = clients.admin(kafka)
        client.create_topics([NewTopic(run_name, 3, 3)])[run_name].result(300)
        produce(kafka, run_name, [b"%d" % n for n in range(300)])

        lost = cluster.leader(run_name, 1)
        node = cluster.nodes[lost]
        assert node is not None
        killed = node.process
        cluster.kill(lost)
        assert not is_running(killed)
        assert cluster.running == [index for index in range(3) if index != lost]
        produce(kafka, run_name, [b"%d" % n for n in range(300, 600)])
        assert cluster.leader(run_name, 1) != lost
        assert cluster.active_controller() != lost
        assert cluster.transaction_coordinator("someone") != lost
        assert cluster.group_coordinator("some-group") != lost

        cluster.restart(lost)
        cluster.await_in_sync()
        produce(kafka, run_name, [b"%d" % n for n in range(600, 900)])
        assert sorted(values(kafka, run_name), key=int) == [b"%d" % n for n in range(900)]  # type: ignore[arg-type]

        with pytest.raises(BrokerUnavailable, match="already runs on"):
            LocalCluster.start(tmp_path, 3)
    assert processes_of(tmp_path) == []
    assert LocalCluster.find(tmp_path) is None


@pytest.mark.long
def test_groups_of_a_node_that_was_just_lost_are_listed_and_new_topics_are_created(
    tmp_path: Path, run_name: str
) -> None:
    groups = [f"{run_name}.group-{number}" for number in range(6)]
    with LocalCluster.start(tmp_path, 3, bound_to_parent=True) as cluster:
        kafka = KafkaConfig(bootstrap_servers=cluster.bootstrap_servers)
        provisioning.apply(kafka, TopicsConfig(), run_name)
        for group in groups:
            with Reader(kafka, group=group) as reader:
                reader.commit([GroupPosition(f"{run_name}.rollouts", 0, 1)], "committing")
        cluster.kill(cluster.group_coordinator(groups[0]))
        assert set(groups) <= set(group_names(kafka))
        assert [position.offset for position in group_positions(kafka, groups[0], {f"{run_name}.rollouts": [0]})] == [1]
        provisioning.apply(kafka, TopicsConfig(), f"{run_name}-next")


@pytest.mark.long
def test_the_command_starts_nodes_that_outlive_it_and_stops_them_all(tmp_path: Path) -> None:
    data = tmp_path / "data"
    started = command("start", "--nodes", "2", "--port", "0", "--json", "--data", str(data))
    assert started.returncode == 0, started.stderr
    try:
        fields = json.loads(started.stdout)
        assert [node["state"] for node in fields["nodes"]] == ["running", "running"]
        status = command("status", "--json", "--data", str(data))
        assert status.returncode == 0
        assert json.loads(status.stdout) == fields

        cluster = LocalCluster.find(data)
        assert cluster is not None
        assert cluster.bootstrap_servers == fields["bootstrap_servers"]
        cluster.kill(1)
        broken = command("status", "--data", str(data))
        assert broken.returncode == 1
        assert f"node 2 {cluster.bootstrap_servers.split(',')[1]} stopped" in broken.stdout

        assert command("stop", "--data", str(data)).returncode == 0
        assert all(identify(node["pid"]) is None for node in fields["nodes"])
        assert command("status", "--data", str(data)).returncode == 1
    finally:
        left = LocalCluster.find(data)
        if left:
            left.stop()
    assert processes_of(data) == []
    with pytest.raises(BrokerUnavailable, match="holds a cluster of 2 nodes, not 3"):
        LocalCluster.start(data, 3)
    with pytest.raises(BrokerUnavailable, match="holds a cluster of 2 nodes"):
        LocalBroker.start(data)


def test_a_cluster_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    refused = ((1, "auto", "1 nodes"), (10, "auto", "10 nodes"), (3, "docker", "need the java provider"))
    for nodes, provider, named in refused:
        with pytest.raises(ConfigurationError, match=named):
            LocalCluster.start(tmp_path, nodes, config=BrokerConfig(provider=provider))
