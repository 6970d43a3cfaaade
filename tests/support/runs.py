"""A run on a real broker for tests: topics provisioned, generation 0 written, rollouts sent, roles as processes.

Everything a test starts here ends with the fixture that made it, by pid.
"""

import dataclasses
import json
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from confluent_kafka import Producer

from rollstream.consumers.grouping.config import GrouperConfig, GroupingConfig
from rollstream.consumers.grouping.process.bootstrap import initialise
from rollstream.topics.config import KafkaConfig, TopicsConfig
from rollstream.topics.kafka import clients, provisioning
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.records import ExcludedBatch, PolicyManifest, Rollout, RolloutMetadata
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import decode, encode
from rollstream.topics.wire.keys import encode_key
from tests.simulation import roles
from tests.support import role_server
from tests.support.batches import random_batch, send_batches
from tests.support.command_line import answer_of, in_full


def rollout(example: str = "x", member: int = 0, **changes: object) -> Rollout:
    """A sound rollout of environment `env`: 6 tokens, 3 of them sampled, reward 1 for even members."""
    values: dict[str, object] = {
        "uid": f"{example}-{member}",
        "group_size": 4,
        "environment": "env",
        "example_id": example,
        "policy_version": 0,
        "lowest_version": 0,
        "highest_version": 0,
        "tokens": np.arange(6, dtype="<i4") + member,
        "loss_mask": np.array([0, 0, 0, 1, 1, 1], bool),
        "logprobs": np.array([0, 0, 0, -0.5, -1.0, -1.5], "<f4"),
        "reward": float(member % 2 == 0),
        "metadata": RolloutMetadata(worker_id="w0", timestamp=1.0),
    }
    return Rollout(**(values | changes))  # type: ignore[arg-type]


@dataclass
class RealRun:
    """One run with its settings and the processes a test started in it."""

    kafka: KafkaConfig
    name: str
    directory: Path
    topics: TopicsConfig = field(default_factory=lambda: TopicsConfig(partitions=2))
    grouping: GroupingConfig = field(default_factory=lambda: GroupingConfig(batch_rollouts=16, max_batch_age_s=2.0))
    grouper: GrouperConfig = field(default_factory=GrouperConfig)
    python_path: tuple[Path, ...] = ()
    """Directories of modules that a test's processes import."""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def prepare(self) -> "RealRun":
        """Create the topics, write generation 0 and publish policy version 0 (a manifest without arrays)."""
        provisioning.apply(self.kafka, self.topics, self.name)
        initialise(self.kafka, self.name, self.grouping, self.grouper)
        self.publish_version(0)
        return self

    def beside(self, name: str) -> "RealRun":
        """Another run with a directory of its own."""
        directory = self.directory / name
        directory.mkdir()
        return RealRun(self.kafka, f"{self.name}-{name}", directory)

    def topic(self, name: str) -> str:
        return topic_name(self.name, name)

    def publish_version(self, version: int) -> None:
        manifest = PolicyManifest(
            version=version, learner="test", step=version, epoch="e", tensors=(), chunks=(), digest=""
        )
        self.send_bytes("policies", encode(manifest), encode_key(version))

    def send(self, rollouts: Iterable[Rollout]) -> None:
        """Produce rollouts as any producer would, and wait for the broker to have them."""
        producer = clients.producer(self.kafka)
        for r in rollouts:
            producer.produce(self.topic("rollouts"), encode(r), encode_key(r.environment, r.example_id))
        assert producer.flush(120) == 0

    def send_bytes(self, topic: str, value: bytes | None, key: bytes, partition: int = -1) -> None:
        producer = clients.producer(self.kafka)
        producer.produce(self.topic(topic), value, key, partition)
        assert producer.flush(120) == 0

    @contextmanager
    def open_transaction(self, topic: str) -> Iterator[Producer]:
        """A foreign transaction that wrote to partition 0 of a topic and does not time out; aborted at the end."""
        settings = {"transaction.timeout.ms": 300_000, "delivery.timeout.ms": 300_000}
        producer = clients.transactional_producer(self.kafka, f"{self.name}-foreign", **settings)
        producer.init_transactions(120)
        producer.begin_transaction()
        producer.produce(self.topic(topic), b"foreign", b"foreign", 0)
        producer.flush(120)
        yield producer
        producer.abort_transaction(120)

    def read(self, topic: str, isolation: str = "read_committed") -> list[object]:
        """Every record of a topic, decoded."""
        messages = read_to_end(self.kafka, self.topic(topic), isolation=isolation)
        return [decode(message.value) for message in messages]

    def command(self, *words: str, **settings: object) -> list[str]:
        """A rollstream command line for this run; `settings` are dotted keys with __ for the dot."""
        flags = [f"--set={key.replace('__', '.')}={value}" for key, value in settings.items()]
        for name in ("grouping", "grouper"):
            part = getattr(self, name)
            usual = type(part)()
            flags += [
                f"--set={name}.{f.name}={_setting(getattr(part, f.name))}"
                for f in dataclasses.fields(part)
                if getattr(part, f.name) != getattr(usual, f.name)
            ]
        flags.append(f"--set=topics.partitions={self.topics.partitions}")
        flags.append(f"--set=data_dir={self.directory}")
        flags += [
            f"--set=kafka.registry.{f.name}={value}"
            for f in dataclasses.fields(self.kafka.registry)
            if (value := getattr(self.kafka.registry, f.name)) != f.default
        ]
        where = ["--run", self.name, "-b", self.kafka.bootstrap_servers]
        return [sys.executable, "-P", "-m", "rollstream", *in_full(words), *where, *flags]

    def start(self, *words: str, script: str = "", forked: bool = True, **settings: object) -> subprocess.Popen[bytes]:
        """Start a role as a process of its own; its log goes to the run's directory. `script` is Python that calls
        the command line itself, after what a test wants different in that process. Without `forked` the process is
        started as users do, for tests that look at its command line or memory."""
        command = self.command(*words, **settings)
        if script:
            command[2:4] = ["-c", script]
        log = self.directory / f"{words[0]}-{len(self.processes)}.log"
        if self.kafka.bootstrap_servers == roles.MODEL:
            assert not script, "a script needs a process"
            self.processes.append(roles.start(command, log))
            return self.processes[-1]
        with log.open("wb") as out:
            where, environment = self.directory, self.environment()
            if forked and not script and role_server.can_fork(environment):
                process: subprocess.Popen[bytes] = role_server.fork(command, out.fileno(), where, environment)
            else:
                process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=where, env=environment)
        self.processes.append(process)
        return process

    def said(self, *words: str, **settings: object) -> "subprocess.CompletedProcess[str]":
        """Exit code and output of a command about this run, carried out in this process."""
        return answer_of(self.directory, *self.command(*words, **settings)[4:])

    def told(self, *words: str, **settings: object) -> str:
        """Output of a command, which must succeed."""
        done = self.said(*words, **settings)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def environment(self) -> dict[str, str]:
        """Variables of the processes that are started here."""
        return role_server.role_environment(*self.python_path)

    def log_of(self, process: subprocess.Popen[bytes]) -> str:
        """Log of a process started here, so far."""
        number = self.processes.index(process)
        return next(self.directory.glob(f"*-{number}.log")).read_text(errors="replace")

    def stop(self) -> None:
        """Kill whatever still runs; pytest shows the logs' ends with a failure."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
            print(f"--- {process.args[4]} (exit {process.returncode})", self.log_of(process)[-3000:], sep="\n")  # type: ignore[index]


def _setting(value: object) -> object:
    """A value as `--set` takes it."""
    return json.dumps(value) if isinstance(value, tuple) else value


SMALL_LEARNER: dict[str, object] = {
    "learner__rollouts_per_step": 32,
    "learner__max_policy_lag": 1000,
    "learner__microbatch_rows": 8,
    "learner__sequence_length": 32,
    "learner__warm_start__steps": 0,
    "learner__threads": 1,
    "learner__model__num_hidden_layers": 1,
    "learner__model__hidden_size": 32,
    "grouping__batch_rollouts": 8,
    "worker__group_size": 4,
}
"""Settings of a learner that takes the batches of `with_batches`, with a model that compiles in seconds."""


def with_batches(run: RealRun, batches: int) -> RealRun:
    """Create topics with so many batches on two partitions in turn, but without the learner's first policy version."""
    provisioning.apply(run.kafka, run.topics, run.name)
    send_batches(run.kafka, run.name, [random_batch(number, partition=number % 2) for number in range(batches)])
    return run


def exclude(run: RealRun, *batch_ids: str) -> None:
    """Record that batches are excluded, as the command does."""
    for batch_id in batch_ids:
        record = ExcludedBatch(batch_id=batch_id, reason="worker w", generation=1)
        run.send_bytes("control", encode(record), encode_key("excluded", batch_id))
