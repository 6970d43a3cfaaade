"""Settings of a broker, and the properties they stand for."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.infra.config import BrokerConfig, ClusterNode, image_environment, render_properties, server_properties
from rollstream.topics.errors import ConfigurationError


def properties(config: BrokerConfig | None = None) -> dict[str, str]:
    return server_properties(config or BrokerConfig(), port=9092, controller_port=9093, log_dir="/data")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("process.roles", "broker,controller"),
        ("listeners", "PLAINTEXT://127.0.0.1:9092,CONTROLLER://127.0.0.1:9093"),
        ("advertised.listeners", "PLAINTEXT://127.0.0.1:9092"),
        ("controller.quorum.voters", "1@127.0.0.1:9093"),
        ("log.dirs", "/data"),
        ("auto.create.topics.enable", "false"),
        ("offsets.retention.minutes", "2147483647"),
        ("transaction.abort.timed.out.transaction.cleanup.interval.ms", "1000"),
        ("group.initial.rebalance.delay.ms", "0"),
        ("transaction.state.log.replication.factor", "1"),
        ("transaction.state.log.min.isr", "1"),
    ],
)
def test_a_single_node_has_the_settings_a_run_depends_on(key: str, value: str) -> None:
    assert properties()[key] == value


@pytest.mark.parametrize(("nodes", "copies", "in_step"), [(2, "2", "1"), (3, "3", "2"), (5, "3", "2")])
def test_a_node_of_a_cluster_keeps_three_copies_and_votes_with_the_others(
    nodes: int, copies: str, in_step: str
) -> None:
    ports = tuple(range(5001, 5001 + nodes))
    given = properties(BrokerConfig(node=ClusterNode(node_id=2, cluster_id="c", controller_ports=ports)))
    assert given["node.id"] == "2"
    assert given["controller.quorum.voters"].split(",")[:2] == ["1@127.0.0.1:5001", "2@127.0.0.1:5002"]
    for topic in ("offsets.topic", "transaction.state.log", "share.coordinator.state.topic", "default"):
        assert given[f"{topic}.replication.factor"] == copies
    assert given["min.insync.replicas"] == given["transaction.state.log.min.isr"] == in_step


def test_kafkas_own_keys_pass_through_and_win() -> None:
    config = BrokerConfig(properties={"message.max.bytes": "1000", "log.retention.ms": "-1"})
    assert properties(config)["message.max.bytes"] == "1000"
    assert properties(config)["log.retention.ms"] == "-1"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"port": 70000}, "70000"),
        ({"port": -1}, "-1"),
        ({"provider": "podman"}, "auto, java, docker"),
        ({"heap_initial_mib": 512}, "512 to 320"),
        ({"properties": {"listeners": "PLAINTEXT://:1"}}, "listeners"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_by_name(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        BrokerConfig(**settings)  # type: ignore[arg-type]


def test_the_data_directory_may_be_anywhere(tmp_path: Path) -> None:
    rendered = render_properties({"log.dirs": r"C:\rollstream\data"})
    assert rendered == "log.dirs=C:\\\\rollstream\\\\data\n"
    # java.util.Properties reads ISO-8859-1, and a character beyond the first 65,536 as its two UTF-16 units.
    assert (
        render_properties({"log.dirs": "/home/jürgen/東/😀"}) == "log.dirs=/home/j\\u00FCrgen/\\u6771/\\uD83D\\uDE00\n"
    )


def test_the_image_gets_every_property_under_its_contracts_name() -> None:
    assert image_environment({"log.dirs": "/d", "a_b-c.d": "1"}) == {"KAFKA_LOG_DIRS": "/d", "KAFKA_A__B___C_D": "1"}
    assert len(image_environment(properties())) == len(properties())


@given(st.sets(st.text("abc._-", min_size=1, max_size=12).filter(lambda key: "__" not in key and ".." not in key)))
def test_keys_that_kafka_could_have_never_share_a_variable(keys: set[str]) -> None:
    # Kafka's keys are words joined by one separator.
    keys = {key for key in keys if all(key.replace("_", ".").replace("-", ".").split("."))}
    assert len(image_environment(dict.fromkeys(keys, ""))) == len(keys)
