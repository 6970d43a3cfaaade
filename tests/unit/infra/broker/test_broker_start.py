"""A broker that ends while it starts, and a broker whose start was killed before it answered."""

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollstream.infra import commands
from rollstream.infra.broker.broker import LocalBroker
from rollstream.infra.broker.broker_state import BrokerState, find
from rollstream.infra.broker.process_identity import is_running
from rollstream.topics.errors import BrokerUnavailable
from tests.support.machine import Machine, script
from tests.support.waiting import eventually

VERSION = """echo 'openjdk version "17" 2025-04-15' >&2"""
STARTING = """
import argparse, sys
from rollstream.infra import commands
parser = argparse.ArgumentParser()
commands.register(parser)
args = parser.parse_args(sys.argv[1:])
sys.exit(args.run(args))
"""


def command(*arguments: str) -> int:
    """Run `rollstream broker ...` in this process and return the exit status."""
    parser = argparse.ArgumentParser()
    commands.register(parser)
    args = parser.parse_args(arguments)
    status: int = args.run(args)
    return status


@pytest.fixture
def kafka(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with a Kafka, which runs in the java that a test writes."""
    environment = machine.environment(PATH=os.fspath(machine.bin), KAFKA_HOME=machine.kafka_home())
    for name in ("JAVA_HOME", "XDG_CACHE_HOME", "KAFKA_BOOTSTRAP_SERVERS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return machine


def java(machine: Machine, *, broker: str, formatting: str = ":") -> None:
    """Write a java that runs these lines of shell as the broker, and where storage is formatted."""
    cases = f"-version) {VERSION};; *StorageTool*) {formatting};; *kafka.Kafka*) {broker};;"
    script(machine.bin / "java", f'case "$*" in {cases} esac')


@contextmanager
def starting(*arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Run `rollstream broker start ...` in another process, which is killed at the end."""
    with subprocess.Popen([sys.executable, "-P", "-c", STARTING, "start", "--port", "0", *arguments]) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def terminated_start(data: Path, *folders: Path) -> Iterator[list[BrokerState]]:
    """Start brokers that never answer, end their start by SIGTERM, and give the states of the brokers that it left."""

    def brokers() -> list[BrokerState]:
        return [state for state in map(find, folders) if state]

    try:
        with starting("--nodes", str(len(folders)), "--data", str(data)) as process:
            eventually(lambda: len(brokers()) == len(folders) or process.poll() is not None, 60, "the brokers run")
            process.send_signal(signal.SIGTERM)
            assert process.wait(300) == -signal.SIGTERM
        yield brokers()
    finally:
        for state in brokers():
            os.kill(state.process.pid, signal.SIGKILL)


def test_data_that_a_newer_kafka_wrote_is_named_as_such(kafka: Machine, tmp_path: Path) -> None:
    # The last line of Kafka 4.2 when it starts on data of 4.3.
    line = (
        "Caused by: org.apache.kafka.common.errors.UnsupportedVersionException: Can't read version 4 of BrokerEndpoint"
    )
    java(kafka, broker=f'echo "{line}"; exit 1')
    with pytest.raises(BrokerUnavailable, match=r"a newer Kafka than .* KAFKA_HOME .* --data"):
        LocalBroker.start(tmp_path / "data")
    assert LocalBroker.find(tmp_path / "data") is None


def test_a_broker_whose_start_was_ended_is_shown_and_stopped(
    kafka: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    java(kafka, broker="exec sleep 600")
    data = tmp_path / "data"
    with terminated_start(data, data) as [broker]:
        assert command("status", "--data", str(data)) == 1
        assert f"{broker.bootstrap_servers} runs but does not answer" in capsys.readouterr().out
        with pytest.raises(BrokerUnavailable, match=f"a broker already runs on {data}: {broker.bootstrap_servers}"):
            command("start", "--port", "0", "--data", str(data))
        assert is_running(broker.process)

        assert command("stop", "--data", str(data)) == 0
        assert f"stopped {broker.bootstrap_servers} (pid {broker.process.pid})" in capsys.readouterr().out
        assert not is_running(broker.process)
        assert command("status", "--data", str(data)) == 1
        assert f"no broker runs on {data}" in capsys.readouterr().out


def test_a_cluster_whose_start_was_ended_is_shown_and_stopped(
    kafka: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    java(kafka, broker="exec sleep 600")
    data = tmp_path / "data"
    with terminated_start(data, data / "node-1", data / "node-2") as [first, second]:
        assert command("status", "--data", str(data)) == 1
        shown = capsys.readouterr().out
        assert f"node 1 {first.bootstrap_servers} silent (pid {first.process.pid}" in shown
        assert f"node 2 {second.bootstrap_servers} silent (pid {second.process.pid}" in shown
        with pytest.raises(BrokerUnavailable, match=f"a cluster already runs on {data}"):
            command("start", "--port", "0", "--data", str(data))

        assert command("stop", "--data", str(data)) == 0
        assert not is_running(first.process)
        assert not is_running(second.process)
        assert command("status", "--data", str(data)) == 1


def test_files_that_cannot_be_written_or_read_are_one_line(kafka: Machine, tmp_path: Path) -> None:
    java(kafka, broker="exec sleep 600")
    for name in ("server.properties", "broker.json", "cluster.json"):
        (tmp_path / name / name).mkdir(parents=True)
    with pytest.raises(BrokerUnavailable, match=r"server\.properties cannot be used .*Is a directory.*--data"):
        command("start", "--port", "0", "--data", str(tmp_path / "server.properties"))
    for name in ("broker.json", "cluster.json"):
        with pytest.raises(BrokerUnavailable, match=rf"{name} cannot be read .*Is a directory.*--data"):
            command("status", "--data", str(tmp_path / name))


def test_a_broker_of_another_user_is_named_as_such(
    kafka: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_pid: int, _number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    java(kafka, broker="exec sleep 600")
    with terminated_start(tmp_path, tmp_path) as [broker], monkeypatch.context() as patch:
        patch.setattr(os, "kill", refused)
        with pytest.raises(BrokerUnavailable, match=rf"pid {broker.process.pid}\) belongs to another user"):
            command("stop", "--data", str(tmp_path))


def test_a_start_is_refused_while_another_one_prepares_the_same_data(kafka: Machine, tmp_path: Path) -> None:
    # The first start formats the storage until the test allows more.
    formatting = f"touch {tmp_path}/formatting; until [ -e {tmp_path}/go ]; do sleep 0.05; done"
    java(kafka, broker="exec sleep 600", formatting=formatting)
    data = tmp_path / "data"
    try:
        with starting("--data", str(data)):
            eventually((tmp_path / "formatting").exists, 60, "the first start formats the storage")
            with pytest.raises(BrokerUnavailable, match=f"another process starts a broker on {data}"):
                command("start", "--port", "0", "--data", str(data))
    finally:
        (tmp_path / "go").touch()
