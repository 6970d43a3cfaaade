"""One process of a learner that publishes policy versions, without JAX, which may kill itself at a chosen moment.

Process 0 leads and commits; the others send their tensors. Parameters are those of `weights_child`.
"""

import json
import os
import signal
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rollstream.consumers.weights.manifests import read_manifests
from rollstream.consumers.weights.publisher import WeightsPublisher
from rollstream.consumers.weights.shard_barrier import Channel, MemberBarrier, ShardMember
from rollstream.consumers.weights.shards import owners
from rollstream.consumers.weights.step_log import StepLog
from rollstream.topics.config import KafkaConfig
from rollstream.topics.wire.catalogue import topic_name
from tests.support.channels import DirectoryChannel
from tests.support.weights_child import SMALL, kill_at_send, kill_before_commit, params_of


def share_of(version: int, process: int, processes: int) -> dict[str, np.ndarray]:
    """The tensors that a process publishes of a version."""
    params = params_of(version)
    owned = owners({name: array.nbytes for name, array in params.items()}, processes)
    return {name: array for name, array in params.items() if owned[name] == process}


def kill_before_report() -> None:
    """This process dies when its chunks are stored and the lead does not know that."""

    def die(self: MemberBarrier, *args: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    MemberBarrier.report = die  # type: ignore[method-assign]


def say(version: int, share: dict[str, np.ndarray]) -> None:
    """Print which version was published, and how many bytes of it this process held."""
    print(json.dumps([version, sum(array.nbytes for array in share.values())]), flush=True)


def lead(kafka: KafkaConfig, run: str, config: Any, channel: Channel, last: int) -> None:
    """Publish up to version `last`."""
    with closing(StepLog(kafka, run, "default")) as log:
        publisher = WeightsPublisher(kafka, run, "default", "{}", config, channel=channel)
        with closing(publisher):
            # Wait for all processes first, because the time limit of a version is for processes that run.
            for process in range(1, channel.processes):
                channel.receive(f"ready/{process}", 600)
            while publisher.latest_version < last:
                version = publisher.latest_version + 1
                share = share_of(version, 0, channel.processes)
                manifest = publisher.stage(version, share, params_digest="of all")
                log.commit([publisher.record(manifest)])
                publisher.committed(manifest)
                say(version, share)


def follow(kafka: KafkaConfig, run: str, config: Any, channel: Channel, last: int) -> None:
    """Send this process's tensors up to version `last`."""
    with closing(ShardMember(kafka, run, config, channel)) as member:
        channel.publish(f"ready/{channel.process}", b"")
        version = max(read_manifests(kafka, run), default=-1)
        while version < last:
            share = share_of(version + 1, channel.process, channel.processes)
            version = member.contribute(share)
            say(version, share)


def main(servers: str, run: str, team: str, directory: str, last: str, moment: str, timeout: str, url: str) -> None:
    """Take part up to version `last`; die at `moment`: a number of chunks, `report` or `commit`."""
    process, processes = map(int, team.split("/"))
    kafka = KafkaConfig(bootstrap_servers=servers)
    config = replace(SMALL, shards_timeout_s=float(timeout))
    if url:
        config = replace(config, transport="files", url=url, file_bytes=SMALL.chunk_bytes)
    if moment == "report":
        kill_before_report()
    elif moment == "commit":
        kill_before_commit()
    elif moment:
        kill_at_send(topic_name(run, "weights"), int(moment))
    part = follow if process else lead
    part(kafka, run, config, DirectoryChannel(Path(directory), process, processes), int(last))


if __name__ == "__main__":
    main(*sys.argv[1:])
