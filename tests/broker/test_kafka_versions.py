"""The demo on brokers of each version of Kafka that deploy.md names, with the settings of a managed service."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rollstream.infra.broker.java_runtime import KAFKA_VERSION
from tests.broker.test_demo import SMALL, environment
from tests.support.kafka_versions import broker_of, tiered_storage

VERSIONS = ("3.9.2", "4.0.2", "4.1.2", "4.2.1", "4.3.1", "4.4.0")
MANAGED = {
    "auto.create.topics.enable": "false",
    "group.min.session.timeout.ms": "6000",
    "message.max.bytes": "1048588",
    "replica.fetch.max.bytes": "1048576",
    "socket.request.max.bytes": "104857600",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "10000",
    "transaction.max.timeout.ms": "900000",
    "unclean.leader.election.enable": "true",
}
"""Settings that Amazon MSK gives its brokers, and defaults of Kafka that our own brokers change."""


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_killed_demo_closes_its_books_on_a_managed_broker_of(version: str, compiled: Path, tmp_path: Path) -> None:
    with broker_of(version, tmp_path / "broker", MANAGED) as servers:
        _close_the_books_of_a_demo(servers, compiled, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_demo_is_verified_from_records_that_are_in_the_remote_storage_alone(compiled: Path, tmp_path: Path) -> None:
    remote, data = tmp_path / "remote", tmp_path / "broker" / "data"
    with broker_of(KAFKA_VERSION, tmp_path / "broker", tiered_storage(remote)) as servers:
        _close_the_books_of_a_demo(servers, compiled, tmp_path, "--set=topics.local_retention_s=10")
        assert list(remote.glob("*/*.rollouts-0-*/*.log")), "the remote storage has no records"
        first = min(path.stem for path in data.glob("*.rollouts-0/*.log"))
        assert int(first) > 0, "the broker has all records on its own disk"


def _close_the_books_of_a_demo(servers: str, compiled: Path, folder: Path, *flags: str) -> None:
    """Train 24 steps, during which a grouping process and the learner are killed."""
    command = ["demo", "--steps", "24", "--json", "--keep", "--data", str(folder / "demo"), *SMALL, *flags]
    answer = subprocess.run(
        [sys.executable, "-P", "-m", "rollstream", *command],
        env=environment(compiled, KAFKA_BOOTSTRAP_SERVERS=servers),
        capture_output=True,
        text=True,
        timeout=3000,
    )
    # Two dozen steps teach nothing, so the promised gain is the only failure.
    assert answer.returncode == 1, answer.stderr
    report = json.loads(answer.stdout)
    [failure] = report["failures"]
    assert "success rose by" in failure
    assert report["steps"] == 24
    assert report["ledger"]["balanced"]
    assert report["ledger"]["unread"] == 0
    assert report["verify"]["batches"] == report["batches"] >= 20
    assert report["verify"]["mismatches"] == 0
    assert [fault["role"].partition("-")[0] for fault in report["faults"]] == ["group", "learn"]
