"""Error messages for a broker that ends while it starts."""

import os
from pathlib import Path

import pytest

from rollstream.infra.broker import LocalBroker
from rollstream.topics.errors import BrokerUnavailable
from tests.support.machine import Machine, script


def test_data_that_a_newer_kafka_wrote_is_named_as_such(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The last line of Kafka 4.2 when it starts on data of 4.3.
    line = (
        "Caused by: org.apache.kafka.common.errors.UnsupportedVersionException: Can't read version 4 of BrokerEndpoint"
    )
    version = """echo 'openjdk version "17" 2025-04-15' >&2"""
    script(machine.bin / "java", f'case "$*" in -version) {version};; *kafka.Kafka*) echo "{line}"; exit 1;; esac')
    environment = machine.environment(PATH=os.fspath(machine.bin), KAFKA_HOME=machine.kafka_home())
    for name in ("JAVA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BrokerUnavailable, match=r"a newer Kafka than .* KAFKA_HOME .* --data"):
        LocalBroker.start(tmp_path / "data")
