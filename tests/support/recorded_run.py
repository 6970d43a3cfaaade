"""A small run of everything, recorded over a model of Kafka by our own processes, for tests that tamper with it."""

import threading
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from typing import Any, NamedTuple, Self

from rollstream.consumers.batch_reader import BatchReader
from rollstream.consumers.grouping.testing import example_rollout
from rollstream.consumers.labeling.config import LabelingConfig
from rollstream.consumers.labeling.process import LabelingProcess
from rollstream.consumers.trainers.step_writer import StepWriter
from rollstream.topics.records import ModelCall, SessionEvent
from rollstream.topics.wire.codec import decode, encode
from rollstream.topics.wire.keys import encode_key
from rollstream.topics.wire.trajectory_arrays import to_record
from tests.simulation.group_coordinator import Committed
from tests.simulation.installation import World
from tests.simulation.partition_log import Entry, PartitionLog
from tests.simulation.scheduler import Process
from tests.support.modelled_run import KAFKA, RUN, ModelledRun
from tests.support.trajectories import double, numbered

FILLER = f"{RUN}.filler-default"
LABELLER = f"{RUN}.labeller"


class Copy(NamedTuple):
    """Topics and committed offsets of a run."""

    topics: dict[str, list[PartitionLog]]
    offsets: dict[str, dict[tuple[str, int], Committed]]


class RecordedRun(ModelledRun):
    """Four batches of four rollouts, a dead letter, a dropped rollout and one in flight; three steps of a learner;
    a labeled, a refused and a left out trajectory, read by a filler; a session; an evaluation."""

    def __init__(self, world: World, call: ModelCall) -> None:
        super().__init__(world)
        for _ in range(3):
            self.send()
            self.group()
        self.write("rollouts", encode_key("env", "0"), b"\xc3\x01 not a record")
        self.write("rollouts", encode_key("env", "other"), encode(example_rollout("astray", 1.0)))
        self.send()
        self.write("rollouts", encode_key("env", "open"), encode(example_rollout("open-0", 1.0, example_id="open")))
        self.group()
        world.result_of(self._learn)
        self._label()
        self.cluster.groups[FILLER].offsets[f"{RUN}.trajectories", 0] = Committed(1)
        for event in (
            SessionEvent(session=call.session, kind="start", environment="env", example_id="0", group_size=2),
            call,
            SessionEvent(session=call.session, kind="finished", uids=("0-0-0",)),
        ):
            self.write("calls", encode_key("env", call.session), encode(event))
        evaluated = example_rollout("evaluated", 1.0, extra={"split": "heldout", "phase": "periodic", "prompts": "1"})
        self.write("evals", encode_key("env", "0"), encode(evaluated))

    def restored(self, copy: "Copy") -> Self:
        """Return the run as it was when `copied` was called."""
        self.cluster.topics.clear()
        self.cluster.topics.update(deepcopy(copy.topics))
        for name, offsets in copy.offsets.items():
            group = self.cluster.groups[name]
            group.offsets, group.pending = dict(offsets), {}
        return self

    def copied(self) -> "Copy":
        """Return a copy of the topics and of the committed offsets."""
        return Copy(
            deepcopy(self.cluster.topics), {name: dict(group.offsets) for name, group in self.cluster.groups.items()}
        )

    # ------------------------------------------------------------------ tampering

    def record(self, name: str, at: int, /) -> Any:
        """Return a record of a topic."""
        return decode(self.log(name).entries[at].value)

    def change(self, name: str, at: int, /, **fields: Any) -> None:
        """Change fields of a record."""
        self.put(name, at, replace(self.record(name, at), **fields))

    def put(self, name: str, offset: int, record: object) -> None:
        """Put another record, or other bytes, in the place of a record."""
        value = record if isinstance(record, bytes) else encode(record)
        entries = self.log(name).entries
        entries[offset] = replace(entries[offset], value=value)

    def remove(self, name: str, offset: int) -> None:
        """Remove a record as compaction does."""
        entries = self.log(name).entries
        entries[offset] = Entry(offset, entries[offset].timestamp_ms, marker="commit")

    def repeat(self, name: str, at: int, /, **fields: Any) -> int:
        """Append a copy of a record, with other fields if any are given; return its offset."""
        entry = self.log(name).entries[at]
        assert entry.value is not None
        value = encode(replace(decode(entry.value), **fields)) if fields else entry.value
        return self.append(name, value, entry.headers)

    def append(self, name: str, value: bytes, headers: Iterable[tuple[str, bytes | None]] = ()) -> int:
        """Append bytes with headers; return their offset."""
        offset = self.write(name, b"", value)
        entries = self.log(name).entries
        entries[offset] = replace(entries[offset], headers=[*headers])
        return offset

    def hide(self, name: str, offset: int) -> None:
        """Make the records from an offset on those of an open transaction."""
        self.log(name).open[77] = offset

    def position(self, group: str, name: str, committed: Committed) -> None:
        """Commit a position."""
        self.cluster.groups[group].offsets[f"{RUN}.{name}", 0] = committed

    # ------------------------------------------------------------------ recording

    def _learn(self) -> None:
        with BatchReader(KAFKA, RUN) as reader, StepWriter(KAFKA, RUN, learner="test", take_over=True) as steps:
            reads = [read for read in (reader.poll(60) for _ in range(3)) if read is not None]
            for number, read in enumerate(reads, 1):
                skipped = {read.entry.batch_id: "too old"} if number == 2 else {}
                steps.record([read], digest=f"checkpoint {number}", skipped=skipped)

    def _label(self) -> None:
        for number in (1, 55, 10):
            value = encode(to_record(numbered(number)))
            self.write("unlabelled", encode_key("w0"), value)
        stop = threading.Event()

        def work() -> None:
            LabelingProcess(double, KAFKA, RUN, LabelingConfig(metrics_interval_s=0), 0, lambda: None).run(stop)

        actor = self._world.scheduler.spawn(Process("label-0"), "label-0", work)
        labeled = self.cluster.groups[LABELLER].offsets
        self._world.scheduler.run(lambda: labeled.get((f"{RUN}.unlabelled", 0), Committed(0)).offset == 3)
        stop.set()
        self._world.scheduler.run(lambda: actor.done)
        assert actor.error is None
        self._world.scheduler.run(lambda: self.cluster.at_rest)
