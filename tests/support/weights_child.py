"""A publisher of policy versions as a process of its own, which may kill itself at a chosen moment.

The parameters of a version are a function of its number, so whoever follows can tell what they should be.
"""

import os
import signal
import sys
import threading
from dataclasses import replace
from typing import Any

import numpy as np

from rollstream.consumers.trainers.step_writer import StepWriter
from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.file_publisher import FileWriter
from rollstream.consumers.weights.step_log import StepLog
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka.sender import Sender
from rollstream.topics.wire.catalogue import topic_name

SHAPE = (40, 50)
TENSORS = 6
SMALL = WeightsConfig(chunk_bytes=4000, keep_versions=3)


def params_of(version: int) -> dict[str, np.ndarray]:
    """Float32 tensors of a version: those of version 0 with one value in a hundred replaced at each version since."""
    random = np.random.default_rng(7)
    params = {f"layer.{number}": random.standard_normal(SHAPE).astype("<f4") for number in range(TENSORS)}
    for change in range(1, version + 1):
        random = np.random.default_rng([7, change])
        for tensor in params.values():
            places = random.choice(tensor.size, tensor.size // 100, replace=False)
            tensor.reshape(-1)[places] = random.standard_normal(len(places)).astype("<f4")
    return params


def kill_at_send(topic: str, number: int) -> None:
    """This process dies once the broker has that many records of a topic from it."""
    send, sent = Sender.send, 0

    def counting(self: Sender, to: str, *args: Any, **options: Any) -> None:
        nonlocal sent
        send(self, to, *args, **options)
        sent += to == topic
        if sent == number:
            self.flush(120)
            os.kill(os.getpid(), signal.SIGKILL)

    Sender.send = counting  # type: ignore[method-assign]


def kill_at_file(number: int) -> None:
    """This process dies once that many files are stored, with others perhaps half on their way."""
    store, lock, stored = FileWriter.store, threading.Lock(), 0

    def counting(self: FileWriter, *args: Any) -> None:
        nonlocal stored
        store(self, *args)
        with lock:
            stored += 1
            if stored == number:
                os.kill(os.getpid(), signal.SIGKILL)

    FileWriter.store = counting  # type: ignore[method-assign]


def kill_before_commit() -> None:
    """This process dies when every chunk of a version is sent and its manifest is not."""

    def die(self: StepLog, *args: Any, **options: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    StepLog.commit = die  # type: ignore[method-assign]


def main(bootstrap_servers: str, run: str, last: str, moment: str, url: str = "") -> None:
    """Publish up to version `last`, a line for each; die at `moment`, if given: a number of chunks or files, or
    `commit`.

    With a URL the bytes go to files there.
    """
    kafka = KafkaConfig(bootstrap_servers=bootstrap_servers)
    config = replace(SMALL, transport="files", url=url, file_bytes=SMALL.chunk_bytes) if url else SMALL
    with StepWriter(kafka, run, config=config) as writer:
        if moment == "commit":
            kill_before_commit()
        elif moment and url:
            kill_at_file(int(moment))
        elif moment:
            kill_at_send(topic_name(run, "weights"), int(moment))
        while writer.version < int(last):
            print(writer.publish_version(params_of(writer.version + 1)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
