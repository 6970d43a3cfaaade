"""Brokers of other versions of Kafka than the one that rollstream brings, with jars from Maven, kept in a cache."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rollstream.infra.broker.java_runtime import KAFKA_VERSION, Jars, cache_dir, find_java, kafka_version, packaged_java
from rollstream.infra.broker.kafka_protocol import broker_answers
from rollstream.infra.broker.launch_commands import prepare
from rollstream.infra.broker.ports import free_ports
from rollstream.infra.broker.providers import JavaKafka
from rollstream.infra.config import BrokerConfig, BrokerLayout
from tests.support.certificates import HOST
from tests.support.paths import ROOT
from tests.support.waiting import eventually


def kafka_home(version: str) -> Path:
    """A directory for KAFKA_HOME with the jars of a version, which Maven fetches once."""
    pom = ("-f", str(ROOT / "infra" / "broker" / "pom.xml"), f"-Dkafka.version={version}")
    home = _from_maven(f"kafka-{version}", "libs", *pom, "dependency:copy-dependencies")
    assert kafka_version(home / "libs") == version, f"{home} does not hold Kafka {version}: delete it"
    return home


def tiered_storage(folder: Path) -> dict[str, str]:
    """Settings of a broker whose remote storage is a directory, by the class with which Kafka tests its own."""
    jar = f"org.apache.kafka:kafka-storage:{KAFKA_VERSION}:jar:test"
    home = _from_maven(f"kafka-storage-{KAFKA_VERSION}", "libs", "dependency:copy", f"-Dartifact={jar}")
    [path] = (home / "libs").glob("*.jar")
    return {
        "remote.log.storage.system.enable": "true",
        "remote.log.storage.manager.class.name": "org.apache.kafka.server.log.remote.storage.LocalTieredStorage",
        "remote.log.storage.manager.class.path": str(path),
        "rsm.config.dir": str(folder),
        "remote.log.metadata.manager.listener.name": "PLAINTEXT",
        "rlmm.config.remote.log.metadata.topic.replication.factor": "1",
        "rlmm.config.remote.log.metadata.topic.num.partitions": "1",
        "remote.log.manager.task.interval.ms": "1000",
        "log.retention.check.interval.ms": "1000",
    }


def _from_maven(name: str, folder: str, *words: str) -> Path:
    """A directory of the cache of tests, whose folder Maven fills once."""
    place = cache_dir(os.environ).with_name("test-files") / name
    if not place.exists():
        maven = shutil.which("mvn")
        assert maven, "jars of other versions of Kafka come from Maven, and mvn is not on PATH"
        filling = place.with_name(f"{name}.{os.getpid()}")
        command = [maven, "-q", "-B", *words, f"-DoutputDirectory={filling / folder}"]
        subprocess.run(command, check=True, timeout=1800, stdin=subprocess.DEVNULL)
        filling.rename(place)
    return place


@contextmanager
def broker_of(version: str, folder: Path, properties: Mapping[str, str]) -> Iterator[str]:
    """Run a broker of a version, older than a local one may be, too, with these settings; its address."""
    java = find_java(os.environ, packaged_java()).runtime
    assert java, "Kafka needs Java"
    layout = BrokerLayout(root=folder)
    folder.mkdir(parents=True)
    port, controller = free_ports(HOST, 2)
    provider = JavaKafka(java, Jars(kafka_home(version) / "libs", version, "test"))
    config = BrokerConfig(data_dir=folder, properties=dict(properties))
    command = prepare(provider, config, layout, port=port, controller_port=controller).command
    with running_broker(command, layout.log, port):
        yield f"{HOST}:{port}"


@contextmanager
def running_broker(command: Sequence[str], log: Path, port: int) -> Iterator[None]:
    """Run the command of a broker, which writes to `log`, from when it answers at a port until the block ends."""
    with log.open("ab") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, stdin=subprocess.DEVNULL)
        try:
            eventually(lambda: broker_answers(HOST, port) or process.poll() is not None, 180, "the broker to answer")
            assert process.poll() is None, log.read_text()[-3000:]
            yield
        finally:
            process.terminate()
            try:
                process.wait(60)
            finally:
                process.kill()
