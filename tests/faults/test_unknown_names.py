"""A reader whose leader has no address for a while, as a container that is down: it waits, then reads."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rollstream.infra.broker.broker import LocalBroker
from rollstream.infra.config import BrokerConfig
from rollstream.topics.config import KafkaConfig
from tests.support.paths import ROOT
from tests.support.runs import RealRun, rollout
from tests.support.waiting import eventually

_FOLLOW = """
import sys
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka.follower import TopicFollower
from rollstream.topics.kafka.records import BEGINNING

server, topic = sys.argv[1:]
places = {(topic, partition): BEGINNING for partition in range(4)}
with TopicFollower(KafkaConfig(bootstrap_servers=server), places) as follower:
    while True:
        values = [record.value for record in follower.poll(100, 0.2)]
        print("values", *map(len, filter(None, values)), flush=True)
"""
_IN_OWN_FILES = "mount --bind {hosts} /etc/hosts && mount --bind {services} /etc/nsswitch.conf && exec {command}"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_follower_waits_for_the_address_of_a_leader_and_reads_from_the_beginning(tmp_path: Path) -> None:
    hosts, services = tmp_path / "hosts", tmp_path / "nsswitch.conf"
    hosts.write_text("")
    services.write_text("hosts: files\n")
    config = BrokerConfig(data_dir=tmp_path / "broker", host="localhost", provider="java")
    with LocalBroker.start(config=config, bound_to_parent=True) as broker:
        run = RealRun(KafkaConfig(bootstrap_servers=broker.bootstrap_servers), "unnamed", tmp_path).prepare()
        run.send([rollout("x", 0)])
        # The first address is known, the name that the broker gives as the leader's is not.
        server = f"127.0.0.1:{broker.bootstrap_servers.rpartition(':')[2]}"
        command = shlex.join([sys.executable, "-c", _FOLLOW, server, run.topic("rollouts")])
        script = _IN_OWN_FILES.format(hosts=hosts, services=services, command=command)
        log = tmp_path / "follower.log"
        with log.open("wb") as out:
            follower = subprocess.Popen(
                ["unshare", "--mount", "sh", "-c", script], stdout=out, stderr=subprocess.STDOUT, cwd=ROOT
            )
        try:

            def read(text: str, times: int) -> bool:
                assert follower.poll() is None, log.read_text()
                return log.read_text().count(text) >= times

            eventually(lambda: read("values\n", 10), 60, "polls without an answer")
            assert "values " not in log.read_text()
            hosts.write_text("127.0.0.1 localhost\n")
            eventually(lambda: read("values ", 1), 60, "the records from the beginning")
        finally:
            follower.kill()
            follower.wait()
