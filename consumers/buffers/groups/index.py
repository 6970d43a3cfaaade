"""The index of sealed groups: a journal with a record for each group, appended after its file is on disk.

With it, opening a store does not read every file. In a store filled by hand the folder is authoritative: files that the
index lacks are added, and a damaged index is made again from all files. A view with a damaged index is filled again.
"""

import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from rollstream.consumers.buffers.groups.group_files import RolloutGroup, read_group
from rollstream.consumers.buffers.storage.journal import Journal, NoJournal, read_journal, write_journal
from rollstream.topics.files.atomic_files import StoreError

INDEX = "groups.journal"


class GroupEntry(NamedTuple):
    """A sealed group on disk."""

    file: str
    group_id: str
    example_id: str
    policy_version: int
    uids: tuple[str, ...]


_RECORD: msgspec.msgpack.Decoder[msgspec.Raw] = msgspec.msgpack.Decoder(msgspec.Raw)
_ENTRY: msgspec.msgpack.Decoder[GroupEntry] = msgspec.msgpack.Decoder(GroupEntry)


class GroupIndex:
    """Entries by group id, in the order the groups sealed. Not thread-safe."""

    def __init__(self, directory: Path, count: int = -1) -> None:
        """Read the index. If `count` is not negative, keep only the first `count` groups; later groups seal again.

        Raises StoreError if the index cannot be read, or has lost some of the first `count` groups.
        """
        self._path = directory / INDEX
        self._records: dict[str, msgspec.Raw] = {}
        """Encoded entries by group id, because entries as Python objects would take three times the memory."""
        self._journal: Journal | None = None
        """Opened by the first append."""
        self._stale = False
        """Whether the file differs from the index in memory."""
        self.damaged: list[str] = []
        """Errors of files that are not in the index and cannot be read."""
        self._unlisted = _parts(directory)
        records = self._read()
        if count > len(records):
            raise StoreError(
                f"{self._path} is damaged: it has {len(records)} of {count} groups; fill a new directory from the log"
            )
        for record in records if count < 0 else records[:count]:
            entry = _ENTRY.decode(record)
            if entry.file in self._unlisted:
                self._records[entry.group_id] = record
                self._unlisted.discard(entry.file)
        self._stale = self._stale or len(self._records) < len(records)
        if count < 0 and self._unlisted:
            self._add_unlisted()

    def _read(self) -> list[msgspec.Raw]:
        """Read the records; a missing or damaged index has none."""
        self._stop = 0
        try:
            reading = read_journal(self._path, _RECORD)
        except NoJournal:
            self._stale = True
            return []
        self._stop, self._stale = reading.stop, reading.damaged or not reading.stop
        return [] if reading.damaged else reading.records

    def _add_unlisted(self) -> None:
        """Add the groups of the files that are not in the index, in the order they sealed."""
        self._stale = True
        added: list[tuple[float, GroupEntry]] = []
        for name in sorted(self._unlisted):
            try:
                group = read_group(self._path.with_name(name))
                added.append((group.sealed_ts, _entry(name, group)))
            except StoreError as error:
                self.damaged.append(str(error))
            except FileNotFoundError:
                continue
        for _sealed_ts, entry in sorted(added):
            self._records[entry.group_id] = _record(entry)
            self._unlisted.discard(entry.file)

    def has_file(self, name: str) -> bool:
        """Whether an intact file of that name exists whose group is not in the index."""
        if name not in self._unlisted:
            return False
        try:
            return bool(read_group(self._path.with_name(name)))
        except (StoreError, FileNotFoundError):
            return False

    def append(self, file: str, group: RolloutGroup) -> None:
        """Add the group of a file that is on disk. If the record cannot be written now, `flush` writes it."""
        entry = _entry(file, group)
        self._records[group.group_id] = _record(entry)
        if self._stale:
            return
        try:
            self._journal = self._journal or Journal(self._path, self._stop)
            self._journal.append(entry)
        except StoreError:
            self._stale = True

    def flush(self) -> None:
        """Write the index to disk. Raises StoreError."""
        if self._stale:
            write_journal(self._path, *self._records.values())
            self._journal, self._stop, self._stale = None, self._path.stat().st_size, False
        elif self._journal is not None:
            self._journal.sync()

    def __contains__(self, group_id: object) -> bool:
        return group_id in self._records

    def __getitem__(self, group_id: str) -> GroupEntry:
        return _ENTRY.decode(self._records[group_id])

    def __iter__(self) -> Iterator[GroupEntry]:
        return map(_ENTRY.decode, list(self._records.values()))

    def __len__(self) -> int:
        return len(self._records)

    def group_ids(self) -> list[str]:
        """Ids of the groups, in the order they sealed."""
        return list(self._records)


class KnownUids:
    """The uids of the rollouts of a store. For rollouts that were on disk when the store was opened, memory has only
    hashes of uids; each hash leads to the index entry of a group, whose uids are compared. Not thread-safe."""

    def __init__(self, index: GroupIndex) -> None:
        self._index = index
        self._group_ids = index.group_ids()
        self._new: set[str] = set()
        hashes, counts = array("q"), array("q")
        for entry in index:
            hashes.extend(map(hash, entry.uids))
            counts.append(len(entry.uids))
        hash_array = np.frombuffer(hashes, np.int64) if hashes else np.empty(0, np.int64)
        order = np.argsort(hash_array, kind="stable")
        self._hashes = hash_array[order]
        self._groups = np.repeat(np.arange(len(counts), dtype=np.int32), counts)[order]

    def add(self, uid: str) -> None:
        """Add the uid of a new rollout."""
        self._new.add(uid)

    def __contains__(self, uid: str) -> bool:
        if uid in self._new:
            return True
        begin, end = (int(np.searchsorted(self._hashes, hash(uid), side)) for side in ("left", "right"))
        return any(uid in self._index[self._group_ids[int(group)]].uids for group in self._groups[begin:end])


def _parts(directory: Path) -> set[str]:
    """Names of the files of groups in a directory, which need not exist."""
    try:
        with os.scandir(directory) as items:
            return {item.name for item in items if item.name.startswith("part-") and item.name.endswith(".parquet")}
    except FileNotFoundError:
        return set()


def _entry(file: str, group: RolloutGroup) -> GroupEntry:
    uids = tuple(rollout.uid for rollout in group.rollouts)
    return GroupEntry(file, group.group_id, group.example_id, group.policy_version, uids)


def _record(entry: GroupEntry) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(entry))
