"""Finds the partition of a group's offsets, and gives kafka-python the brokers that librdkafka reaches."""

from pathlib import Path

import pytest

from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.kafka.hanging_transactions import offsets_partition, settings_of


@pytest.mark.parametrize(
    ("group", "java_hash"),
    # "Aa" and "BB" have one hash; the last name's hash is the smallest integer, whose absolute value is 0 for Kafka.
    [("", 0), ("abc", 96354), ("Aa", 2112), ("BB", 2112), ("main.grouper", -1), ("polygenelubricants", 0)],
)
def test_the_partition_of_a_group_is_that_of_javas_hash(group: str, java_hash: int) -> None:
    if java_hash == -1:
        # Computed character by character, with the sign of Java's int.
        java_hash = 0
        for character in group:
            java_hash = (31 * java_hash + ord(character) + 2**31) % 2**32 - 2**31
    assert offsets_partition(group, 50) == abs(java_hash) % 50


def test_tls_and_sasl_are_called_as_kafka_python_calls_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASSWORD_OF_KAFKA", "canary")
    client = {
        "security.protocol": "sasl_ssl",
        "sasl.mechanisms": "SCRAM-SHA-512",
        "sasl.username": "me",
        "sasl.password": "env:PASSWORD_OF_KAFKA",
        "ssl.ca.location": "/etc/ca.pem",
        "ssl.endpoint.identification.algorithm": "none",
        "socket.timeout.ms": "1000",
    }
    settings = settings_of(KafkaConfig(bootstrap_servers="a:1,b:2", client=client))
    assert settings["bootstrap_servers"] == ["a:1", "b:2"]
    assert {key: settings[key] for key in settings if key.startswith(("s", "ssl"))} == {
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_plain_username": "me",
        "sasl_plain_password": "canary",
        "ssl_cafile": "/etc/ca.pem",
        "ssl_check_hostname": False,
    }


def test_a_key_that_means_nothing_to_kafka_python_is_refused_with_another_way() -> None:
    with pytest.raises(ConfigurationError, match=r'"sasl.oauthbearer.config".*kafka-transactions\.sh'):
        settings_of(KafkaConfig(client={"sasl.oauthbearer.config": "x"}))


def test_authorities_of_the_system_need_no_file_and_a_directory_of_them_is_refused(tmp_path: Path) -> None:
    assert "ssl_cafile" not in settings_of(KafkaConfig(client={"ssl.ca.location": "probe"}))
    with pytest.raises(ConfigurationError, match="give a file with the certificates"):
        settings_of(KafkaConfig(client={"ssl.ca.location": str(tmp_path)}))
