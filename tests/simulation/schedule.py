"""One schedule: grouping processes that are killed, stopped, cut off and started again, until all is grouped.

A seed draws everything: what is sent and when, which faults come at which step, who goes on, which answers are lost.
"""

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from rollstream.consumers.grouping.config import GrouperConfig, GroupingConfig
from rollstream.consumers.grouping.process.bootstrap import initialise
from rollstream.consumers.grouping.process.grouping_process import GroupingProcess
from rollstream.consumers.grouping.testing import example_rollout
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import BrokerUnavailable, DeliveryError, Fenced
from rollstream.topics.records import PausedPartition, PolicyManifest
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key, partition_of
from tests.faults.auditor import judge
from tests.faults.evidence import TOPICS, Evidence, Raw
from tests.simulation.cluster import Cluster
from tests.simulation.installation import World
from tests.simulation.scheduler import Crashed, Endless, Process, Scheduler

RUN = "simulated"
PARTITIONS = 2
KAFKA = KafkaConfig(bootstrap_servers="model:1", session_timeout_s=6.0, transaction_timeout_s=10.0)
GROUPING = GroupingConfig(batch_rollouts=4, max_batch_age_s=1.5)
GROUPER = GrouperConfig(commit_interval_s=1.0, metrics_interval_s=0, snapshot_every=5)
CALM_S = 4.0
"""A run has come to rest if its processes wrote nothing for so long: longer than the age of batches and their turns."""
ENDS_A_PROCESS = (Fenced, DeliveryError, BrokerUnavailable)
"""Errors with which a process may end; whoever runs it starts it again."""
KINDS = ("kill", "kill", "kill", "stop", "cut", "lose", "hang", "term", "more", "rival", "pause")
"""kill -9, SIGSTOP for a while, no network for a while, one lost answer, a call that never returns, SIGTERM, one more
process, one more under the same ordinal, and a partition that an operator pauses for a while."""
HORIZON = 700
"""Steps of a schedule in which faults come; about what an undisturbed one takes."""


@dataclass(frozen=True)
class Fault:
    """A fault of the process that makes a step."""

    step: int
    kind: str
    """One of KINDS."""
    for_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind} at step {self.step}" + (f" for {self.for_s:g} s" if self.for_s else "")


def drawn_faults(seed: int) -> tuple[Fault, ...]:
    """Return the faults of a seed, in their order."""
    rng = random.Random(f"faults of {seed}")
    steps = sorted(rng.randrange(HORIZON) for _ in range(rng.randrange(4)))
    return tuple(Fault(step, rng.choice(KINDS), rng.choice((0.5, 3.0, 7.0, 12.0, 30.0))) for step in steps)


def long_stops(seed: int) -> tuple[Fault, ...]:
    """Return three stops that outlast a session, so that partitions go to another process and back."""
    rng = random.Random(f"stops of {seed}")
    steps = sorted(rng.randrange(HORIZON) for _ in range(3))
    return tuple(Fault(step, "stop", rng.choice((12.0, 30.0))) for step in steps)


@dataclass(frozen=True)
class Outcome:
    """Outcome of a schedule."""

    seed: int
    faults: tuple[Fault, ...]
    findings: tuple[str, ...]
    steps: int
    fingerprint: str
    """Digest of the content of all topics, times included."""

    def __str__(self) -> str:
        story = "; ".join(map(str, self.faults)) or "no fault"
        return f"seed {self.seed} ({story}): {self.findings[:3]}"


def as_it_is(cluster: Cluster) -> None:
    """Leave a cluster as it is."""


def run_schedule(
    world: World,
    seed: int,
    faults: tuple[Fault, ...] | None = None,
    tamper: Callable[[Cluster], None] = as_it_is,
) -> Outcome:
    """Run a schedule and judge it; `faults` replace those of the seed, `tamper` breaks the cluster."""
    return _Schedule(world, seed, drawn_faults(seed) if faults is None else faults, tamper).run()


def shrunk(world: World, outcome: Outcome) -> Outcome:
    """Return an outcome of the same seed with findings, of whose faults none can be left out."""
    for fault in outcome.faults:
        fewer = run_schedule(world, outcome.seed, tuple(other for other in outcome.faults if other is not fault))
        if fewer.findings:
            return shrunk(world, fewer)
    return outcome


class _Schedule:
    def __init__(self, world: World, seed: int, faults: tuple[Fault, ...], tamper: Callable[[Cluster], None]) -> None:
        self._seed, self._faults, self._left = seed, faults, list(faults)
        self._scheduler = Scheduler(seed)
        self._cluster = world.cluster = Cluster(self._scheduler)
        tamper(self._cluster)
        self._processes: dict[str, tuple[Process, threading.Event]] = {}
        self._count = 0
        self._sending = True
        self._closing = False
        self._paused = 0
        self._calm_since_s = 0.0
        self._unexpected: list[str] = []
        self._begun_step = 0

    def run(self) -> Outcome:
        try:
            self._go()
            findings = self._judged()
        except Endless as endless:
            findings = [f"progress: {endless}"]
        finally:
            self._scheduler.end()
        return Outcome(self._seed, self._faults, tuple(findings), self._scheduler.steps, self._cluster.fingerprint)

    def _go(self) -> None:
        scheduler = self._scheduler
        for topic in ("rollouts", "batches", "journal", "dead-letters"):
            self._cluster.create(f"{RUN}.{topic}", PARTITIONS)
        for topic in ("batch-index", "policies", "control", "metrics"):
            self._cluster.create(f"{RUN}.{topic}", 1)
        setup = scheduler.spawn(Process("apply"), "apply", lambda: initialise(KAFKA, RUN, GROUPING, GROUPER))
        scheduler.run(lambda: setup.done)
        assert setup.result is True, setup.error
        self._cluster.append((f"{RUN}.policies", 0), encode_key(0), _policy(), [], (-2, 0), 0)
        self._begun_step = scheduler.steps
        scheduler.on_step = self._on_step
        for ordinal in range(scheduler.rng.choice((1, 2, 2, 3))):
            self._start(ordinal)
        scheduler.spawn(Process("load"), "load", self._send)
        scheduler.run(self._at_rest)
        self._closing = True
        for _process, stop in self._processes.values():
            stop.set()
        scheduler.run(lambda: not self._processes)
        scheduler.run(lambda: self._cluster.at_rest)

    # ------------------------------------------------------------------ what is sent

    def _send(self) -> None:
        rng = self._scheduler.rng
        values = list(_rollouts())
        rng.shuffle(values)
        for number, (partition, key, value) in enumerate(values):
            self._cluster.append((f"{RUN}.rollouts", partition), key, value, [], (-1, number), 0)
            if rng.random() < 0.5:
                self._scheduler.sleep(rng.choice((0.001, 0.01, 0.2)))
        self._sending = False

    # ------------------------------------------------------------------ processes

    def _start(self, ordinal: int, name: str = "") -> None:
        self._count += 1
        process, stop = Process(name or f"group-{ordinal}"), threading.Event()
        if self._closing:
            stop.set()
        key = process.name
        self._processes[key] = process, stop

        def work() -> None:
            try:
                GroupingProcess(KAFKA, RUN, GROUPING, GROUPER, ordinal, lambda: None).run(stop)
            except Crashed:
                self._ended(key, process, ordinal, "")
                raise
            except ENDS_A_PROCESS:
                self._ended(key, process, ordinal, "")
            except BaseException as error:
                self._ended(key, process, ordinal, f"a process ended: {type(error).__name__}: {error}")
            else:
                self._ended(key, process, ordinal, "")

        self._scheduler.spawn(process, key, work)

    def _ended(self, key: str, process: Process, ordinal: int, finding: str) -> None:
        process.alive = False
        if self._processes.get(key, (None, None))[0] is process:
            del self._processes[key]
        if finding:
            self._unexpected.append(finding)
        elif not self._closing and not key.startswith("rival"):
            # It restarts sometimes at once, sometimes after its session has ended.
            self._scheduler.later(self._scheduler.rng.choice((0.01, 0.5, 8.0)), lambda: self._restart(ordinal))

    def _restart(self, ordinal: int) -> None:
        if not self._closing and f"group-{ordinal}" not in self._processes:
            self._start(ordinal)

    # ------------------------------------------------------------------ faults

    def _on_step(self, process: Process) -> None:
        if not self._left or process.name == "load" or self._scheduler.steps - self._begun_step < self._left[0].step:
            return
        fault = self._left.pop(0)
        scheduler = self._scheduler
        until_s = scheduler.now_s + fault.for_s
        if fault.kind == "kill":
            process.alive = False
        elif fault.kind == "stop":
            process.stopped_until_s = until_s
        elif fault.kind == "cut":
            process.cut_until_s = until_s
        elif fault.kind == "lose":
            process.losing = True
        elif fault.kind == "hang":
            process.hanging = True
        elif fault.kind == "term":
            for other, stop in self._processes.values():
                if other is process:
                    stop.set()
        elif fault.kind == "more":
            self._start(3 + self._count)
        elif fault.kind == "pause" and not self._closing:
            self._pause(scheduler.rng.randrange(PARTITIONS), fault.for_s)
        elif fault.kind == "rival":
            ordinal = int(process.name.rpartition("-")[2])
            self._start(ordinal, f"rival{self._count}-{ordinal}")

    def _pause(self, partition: int, for_s: float) -> None:
        record = encode(PausedPartition(partition=partition, reason="a fault"))

        def write(value: bytes | None) -> None:
            self._paused += 1 if value else -1
            place, key = (f"{RUN}.control", 0), encode_key("paused", partition)
            self._cluster.append(place, key, value, [], (-3, self._cluster.log(place).end), 0)

        write(record)
        self._scheduler.later(for_s, lambda: write(None))

    # ------------------------------------------------------------------ the end

    def _at_rest(self) -> bool:
        """Whether nothing was written for a while, although every partition has an owner that could write."""
        if self._unexpected:
            return True
        publishing = any(
            not thread.done for process, _stop in self._processes.values() for thread in process.actors[1:]
        )
        if self._sending or self._paused or publishing or not self._cluster.groups[f"{RUN}.grouper"].served:
            self._calm_since_s = self._scheduler.now_s
        calm_s = self._scheduler.now_s - max(self._calm_since_s, self._cluster.changed_s)
        return calm_s > CALM_S and self._cluster.at_rest and self._all_read()

    def _all_read(self) -> bool:
        group = self._cluster.groups[f"{RUN}.grouper"]
        topic = f"{RUN}.rollouts"
        return all(
            log.end <= group.offsets[topic, number].offset for number, log in enumerate(self._cluster.topics[topic])
        )

    def _judged(self) -> list[str]:
        findings = list(self._unexpected)
        if findings:
            return findings
        audit = judge(self._evidence())
        findings += audit.findings
        findings += [f"not modelled: {reason}" for reason in audit.not_modelled.values()]
        if audit.places["in flight"]:
            findings.append(f"progress: {audit.places['in flight']} records are still in flight")
        return findings

    def _evidence(self) -> Evidence:
        topics: dict[str, list[Raw]] = {}
        for name in TOPICS:
            topics[name] = [
                Raw(number, entry.offset, entry.timestamp_ms, entry.key, entry.value, dict(entry.headers))
                for number, log in enumerate(self._cluster.topics[f"{RUN}.{name}"])
                for entry in log.visible(0, log.end, True)[0]
            ]
        group = self._cluster.groups[f"{RUN}.grouper"]
        committed = {number: group.offsets[f"{RUN}.rollouts", number].offset for number in range(PARTITIONS)}
        return Evidence(topics, committed)


@cache
def _policy() -> bytes:
    return encode(PolicyManifest(version=0, learner="test", step=0, epoch="e", tensors=(), chunks=(), digest=""))


@cache
def _rollouts() -> tuple[tuple[int, bytes, bytes], ...]:
    """Records by partition: groups of two, one member twice, and bytes that are no record."""
    records: list[tuple[int, bytes, bytes]] = []
    for number in range(8):
        key = encode_key("env", example := f"x{number}")
        partition = partition_of(key, PARTITIONS)
        for member in range(2):
            rollout = example_rollout(
                f"{example}-{member}",
                float(member),
                example_id=example,
                tokens=np.arange(4, dtype="<i4") + number,
            )
            records.append((partition, key, encode(rollout)))
    records.append(records[0])
    records.append((1, b"poison", b"no record of ours"))
    return tuple(records)
