"""A grouping task without a broker, for tests of batch makers, estimators and configurations.

`GroupingTestDriver` runs the same fold as a grouping process: pipe records, advance stream time, publish policy
versions, crash and restore, read batches and drops. A grouping process makes the same batches and drops from the same
log.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core import task_state
from rollstream.consumers.grouping.core.effects import DeadLetter, InputRecord
from rollstream.consumers.grouping.core.estimators import ESTIMATORS, Estimator
from rollstream.consumers.grouping.core.fold import Fold
from rollstream.consumers.grouping.core.plug_ins import MAKERS, MakerFactory, PlugIns, checked
from rollstream.topics.records import Drop, GroupCancelled, JournalRecord, Mark, Rollout, TrainingBatch
from rollstream.topics.wire.codec import decode_as, encode
from rollstream.topics.wire.keys import encode_key

Piped = Rollout | GroupCancelled | Mark | InputRecord | bytes | None


def example_rollout(uid: str, reward: float = 0.0, **fields: Any) -> Rollout:
    """Return a valid rollout of two prompt and two sampled tokens; any field may be given.

    Defaults: environment "env", example "0", policy version 0 (lowest and highest follow it), group_size 2.
    """
    version = fields.setdefault("policy_version", 0)
    fields.setdefault("environment", "env")
    fields.setdefault("example_id", "0")
    fields.setdefault("group_size", 2)
    fields.setdefault("lowest_version", version)
    fields.setdefault("highest_version", max(version, fields["lowest_version"]))
    fields.setdefault("tokens", np.array([1, 2, 3, 4], "<i4"))
    length = len(fields["tokens"])
    mask = fields.setdefault("loss_mask", np.arange(length) >= length // 2)
    fields.setdefault("logprobs", np.where(mask, -0.5, 0.0).astype("<f4"))
    return Rollout(uid=uid, reward=reward, **fields)


class GroupingTestDriver:
    """One partition of `rollouts`, its fold and its journal, in memory.

    The driver assigns offsets and times: the first record has offset 0, and time stands still until a call moves it.
    Effects are visible once committed; reading `batches`, `drops`, `dead_letters` or `journal` commits first.
    """

    def __init__(
        self,
        config: GroupingConfig | None = None,
        partition: int = 0,
        partitions: int = 1,
        *,
        policy_version: int = 0,
        makers: Mapping[str, MakerFactory] | None = None,
        estimators: Mapping[str, Estimator] | None = None,
        now_ms: int = 0,
    ) -> None:
        """Start an empty partition. `makers` and `estimators` are your own, by the names that a configuration may use.

        `policy_version` is the policy clock at the start, -1 if nothing was published yet.
        """
        first = task_state.initial_record(partition, partitions, "test", config or GroupingConfig())
        first = replace(first, policy_version=policy_version, watermark_policy_version=policy_version)
        own = {name: checked(name, estimator) for name, estimator in (estimators or {}).items()}
        self._plug_ins = PlugIns({**MAKERS, **(makers or {})}, {**ESTIMATORS, **own})
        self._skips: dict[int, str] = {}
        self._log: list[InputRecord] = []
        self._journal = [first]
        self._batches: list[TrainingBatch] = []
        self._dead_letters: list[DeadLetter] = []
        self._read = 0
        self.now_ms = now_ms
        self.fold = Fold(task_state.restored_state([first]), self._plug_ins, self._skips)

    # ------------------------------------------------------------------ writing to the log

    def pipe(self, record: Piped, at_ms: int | None = None) -> int:
        """Append a record, read it, and return its offset.

        Rollouts, cancellations and marks are encoded with their key; bytes or None are appended as a value without a
        key; an `InputRecord` is appended at its own offset and time, and `at_ms` is ignored. Otherwise, `at_ms` sets
        the driver's time, which may also go back (stream time never does). Raises ValueError for an InputRecord below
        the end of the log.
        """
        if not isinstance(record, InputRecord):
            if at_ms is not None:
                self.now_ms = at_ms
            record = InputRecord(self.end, self.now_ms, *_key_and_value(record))
        if record.offset < self.end:
            raise ValueError(f"offset {record.offset} is taken: the log ends at {self.end}")
        self._log.append(record)
        self._read_on()
        return record.offset

    def advance(self, ms: int) -> None:
        """Advance the time and append a deadline mark, as a task does when a deadline is overdue."""
        self.now_ms += ms
        self.pipe(Mark(kind="deadline"))

    def publish_policy_version(self, version: int) -> None:
        """Move the policy clock with a mark."""
        self.pipe(Mark(kind="policy_version", policy_version=version))

    def drain(self) -> None:
        """With a drain mark, cut batches of all rollouts that the batch maker holds, and drop the open groups."""
        self.pipe(Mark(kind="drain"))

    def skip(self, offset: int, reason: str) -> None:
        """Make a record a dead letter without decoding it, unless it was already read."""
        self._skips[offset] = reason

    def configure(self, config: GroupingConfig) -> None:
        """Put a configuration in force, with a generation above the current one."""
        generation = max(config.generation, self.fold.config.generation + 1)
        config = replace(config, generation=generation)
        self.pipe(Mark(kind="configuration", generation=generation, configuration=config.to_json()))

    # ------------------------------------------------------------------ transactions and crashes

    def commit(self, *, snapshot: bool = False) -> JournalRecord:
        """Commit a transaction: effects since the last one become visible and survive a crash."""
        output = self.fold.prepare_commit(snapshot=snapshot)
        self._journal += [decode_as(JournalRecord, encode(record)) for record in output.records]
        self._batches += [decode_as(TrainingBatch, encode(batch)) for batch in output.batches]
        self._dead_letters += output.dead_letters
        return output.journal

    def crash_and_restore(self) -> None:
        """Discard the fold with all uncommitted effects, restore it from journal and log, and read on."""
        restored = task_state.restored_state(self._journal_needed())
        self.fold = Fold(restored, self._plug_ins, self._skips)
        if self.fold.replaying:
            for record in self._log:
                if restored.watermark <= record.offset < restored.position:
                    self.fold.replay(record)
            self.fold.resume()
        self._read = next((i for i, r in enumerate(self._log) if r.offset >= restored.position), len(self._log))
        self._read_on()

    def _journal_needed(self) -> list[JournalRecord]:
        """Return the journal records that a restore needs.

        They begin with the newest snapshot, or with the record of the oldest remembered group if that is earlier.
        """
        records = self._journal
        since = records[-1].remembered_since_ms
        snapshot = max(i for i, record in enumerate(records) if record.snapshot and record.part == 0)
        remembered = (i for i, r in enumerate(records) if any(g.finished_ms >= since for g in r.finished_groups))
        return records[min(snapshot, next(remembered, snapshot)) :]

    def _read_on(self) -> None:
        while self._read < len(self._log):
            self._read += 1
            self.fold.apply(self._log[self._read - 1])

    # ------------------------------------------------------------------ reading

    @property
    def batches(self) -> list[TrainingBatch]:
        """Committed batches, oldest first, as a reader decodes them."""
        self._commit_changes()
        return list(self._batches)

    @property
    def dead_letters(self) -> list[DeadLetter]:
        """Committed dead letters: records that could not be decoded, or were skipped."""
        self._commit_changes()
        return list(self._dead_letters)

    @property
    def journal(self) -> list[JournalRecord]:
        """The journal from its first record on."""
        self._commit_changes()
        return list(self._journal)

    @property
    def drops(self) -> list[Drop]:
        """Dropped records, in the order in which they were dropped."""
        return [drop for record in self.journal for drop in record.drops]

    @property
    def log(self) -> list[InputRecord]:
        """The partition: every record that was piped, marks included."""
        return list(self._log)

    @property
    def end(self) -> int:
        """Offset of the next record."""
        return self._log[-1].offset + 1 if self._log else 0

    def _commit_changes(self) -> None:
        if self.fold.changed:
            self.commit()


def _key_and_value(record: Rollout | GroupCancelled | Mark | bytes | None) -> tuple[bytes | None, bytes | None]:
    if record is None or isinstance(record, bytes):
        return None, record
    if isinstance(record, Mark):
        return encode_key("mark", record.kind), encode(record)
    return encode_key(record.environment, record.example_id), encode(record)
