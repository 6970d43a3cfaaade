"""A grouping task without a broker, for tests of batch makers, estimators and configurations.

`GroupingTestDriver` runs the very fold a consumer runs: pipe records, advance stream time, publish policy versions,
crash and restore, read batches and drops. What a test sees here, a consumer does on the same log.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from consumers.grouping import state
from consumers.grouping.changes import DeadLetter, Record
from consumers.grouping.config import GroupingConfig
from consumers.grouping.fold import Fold
from consumers.grouping.makers import MAKERS, MakerFactory
from topics.codec import decode_as, encode
from topics.keys import encode_key
from topics.records import Drop, GroupCancelled, JournalRecord, Mark, Rollout, TrainingBatch

Piped = Rollout | GroupCancelled | Mark | Record | bytes | None


def example_rollout(uid: str, reward: float = 0.0, **fields: Any) -> Rollout:
    """A sound rollout of two prompt and two sampled tokens; any field may be given.

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

    Offsets and time are the driver's: the first record has offset 0, and time stands still unless told to move.
    Effects show once committed; reading `batches`, `drops`, `dead_letters` or `journal` commits first.
    """

    def __init__(
        self,
        config: GroupingConfig | None = None,
        partition: int = 0,
        partitions: int = 1,
        *,
        policy_version: int = 0,
        makers: Mapping[str, MakerFactory] | None = None,
        now_ms: int = 0,
    ) -> None:
        """Start with generation 0. `makers` are batch makers of yours by name, for `config.maker` to choose.

        `policy_version` is the policy clock at the start; -1 where nothing was published yet.
        """
        first = state.initial(partition, partitions, "test", config or GroupingConfig())
        first = replace(first, policy_version=policy_version, watermark_policy_version=policy_version)
        self._makers = {**MAKERS, **(makers or {})}
        self._skips: dict[int, str] = {}
        self._log: list[Record] = []
        self._journal = [first]
        self._batches: list[TrainingBatch] = []
        self._dead_letters: list[DeadLetter] = []
        self._read = 0
        self.now_ms = now_ms
        self.fold = Fold(state.restore([first]), self._makers, self._skips)

    # ------------------------------------------------------------------ writing to the log

    def pipe(self, record: Piped, at_ms: int | None = None) -> int:
        """Append a record and read it; returns its offset.

        Rollouts, cancellations and marks are encoded and given their key; bytes (or None) are a value as it is, without
        a key; a `Record` is taken as it is, at its own offset and time. `at_ms` moves the driver's time, to earlier
        times too (stream time never goes back). Raises ValueError for a Record below the end of the log.
        """
        if not isinstance(record, Record):
            if at_ms is not None:
                self.now_ms = at_ms
            record = Record(self.end, self.now_ms, *_key_and_value(record))
        if record.offset < self.end:
            raise ValueError(f"offset {record.offset} is taken: the log ends at {self.end}")
        self._log.append(record)
        self._read_on()
        return record.offset

    def advance(self, ms: int) -> None:
        """Let time pass, and say so on the log with a deadline mark, as a task does when something is overdue."""
        self.now_ms += ms
        self.pipe(Mark(kind="deadline"))

    def publish_policy_version(self, version: int) -> None:
        """Move the policy clock with a mark."""
        self.pipe(Mark(kind="policy_version", policy_version=version))

    def drain(self) -> None:
        """Have what is sealed cut, whatever its size."""
        self.pipe(Mark(kind="drain"))

    def skip(self, offset: int, reason: str) -> None:
        """Have a record left out unread, where it has not been read by then."""
        self._skips[offset] = reason

    def configure(self, config: GroupingConfig) -> None:
        """Put a configuration in force; its generation is raised above the current one where it is not."""
        generation = max(config.generation, self.fold.config.generation + 1)
        config = replace(config, generation=generation)
        self.pipe(Mark(kind="configuration", generation=generation, configuration=config.to_json()))

    # ------------------------------------------------------------------ transactions and crashes

    def commit(self, *, snapshot: bool = False) -> JournalRecord:
        """End a transaction: what happened since the last one becomes visible and survives a crash."""
        output = self.fold.take(snapshot=snapshot)
        self._journal += [decode_as(JournalRecord, encode(record)) for record in output.records]
        self._batches += [decode_as(TrainingBatch, encode(batch)) for batch in output.batches]
        self._dead_letters += output.dead_letters
        return output.journal

    def crash_and_restore(self) -> None:
        """Throw the fold away with all that was not committed, restore it from journal and log, and read on."""
        restored = state.restore(self._journal_needed())
        self.fold = Fold(restored, self._makers, self._skips)
        if self.fold.replaying:
            for record in self._log:
                if restored.watermark <= record.offset < restored.position:
                    self.fold.replay(record)
            self.fold.resume()
        self._read = next((i for i, r in enumerate(self._log) if r.offset >= restored.position), len(self._log))
        self._read_on()

    def _journal_needed(self) -> list[JournalRecord]:
        """The least of the journal that restores: from the newest snapshot, or the oldest group still remembered."""
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
        """Batches committed, oldest first, as a reader decodes them."""
        self._settle()
        return list(self._batches)

    @property
    def dead_letters(self) -> list[DeadLetter]:
        """Records that could not be decoded."""
        self._settle()
        return list(self._dead_letters)

    @property
    def journal(self) -> list[JournalRecord]:
        """The journal from generation 0 on."""
        self._settle()
        return list(self._journal)

    @property
    def drops(self) -> list[Drop]:
        """Records dropped, in the order they were."""
        return [drop for record in self.journal for drop in record.drops]

    @property
    def log(self) -> list[Record]:
        """The partition: every record piped, marks included."""
        return list(self._log)

    @property
    def end(self) -> int:
        """Offset the next record gets."""
        return self._log[-1].offset + 1 if self._log else 0

    def _settle(self) -> None:
        if self.fold.changed:
            self.commit()


def _key_and_value(record: Rollout | GroupCancelled | Mark | bytes | None) -> tuple[bytes | None, bytes | None]:
    if record is None or isinstance(record, bytes):
        return None, record
    if isinstance(record, Mark):
        return encode_key("mark", record.kind), encode(record)
    return encode_key(record.environment, record.example_id), encode(record)
