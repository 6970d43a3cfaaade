"""The index of sealed groups: one line for each group, appended after its file is on disk, so every named file exists.

With it, opening a store does not read every file. The folder is authoritative: torn or damaged lines, missing entries
and entries without a file are repaired from it. Every line ends with its checksum.
"""

import json
import os
import re
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rollstream.consumers.buffers.groups.group_files import RolloutGroup, part_name, read_groups
from rollstream.consumers.files.atomic_files import StoreError, write_bytes

_NAME = "groups.jsonl"
_CHECKSUM = b"\t%08x"
"""End of a line: CRC-32 of the JSON before it, which has no tab."""
_CHECKSUM_BYTES = 9
_NAMES = re.compile(rb"part-[0-9a-f-]{36}\.parquet|(?<![0-9a-f])[0-9a-f]{40}(?![0-9a-f])")
"""Texts in a damaged line that may name a group: a file name or a group id."""


class GroupEntry(NamedTuple):
    """A sealed group on disk."""

    file: str
    group_id: str
    example_id: str
    policy_version: int
    uids: tuple[str, ...]


class GroupIndex:
    """Entries by group id, in the order the groups sealed. Not thread-safe."""

    def __init__(self, directory: Path, count: int = -1) -> None:
        """Read the index. If `count` is not negative, keep only the first `count` groups; later groups seal again."""
        self._path = directory / _NAME
        self._lines: dict[str, bytes] = {}
        """Lines by group id, without checksums; entries as Python objects would take three times the memory."""
        self._stale = False
        """Whether the file differs from the index in memory."""
        self._unsynced = False
        self.damaged: list[str] = []
        """Errors of files that are not in the index and cannot be read."""
        unlisted = _parts(directory)
        group_ids = self._read(unlisted)
        if 0 <= count <= len(group_ids) and None not in group_ids[:count]:
            self._stale = self._stale or count < len(group_ids)
            for group_id in filter(None, group_ids[count:]):
                unlisted.add(_parse(self._lines.pop(group_id)).file)
        else:
            for name in sorted(unlisted):
                self._add_from_file(name, unlisted)
        self._unlisted = unlisted

    def _add_from_file(self, name: str, unlisted: set[str]) -> GroupEntry | None:
        """Add the group of a file, and remove the name from `unlisted`; return None if the file cannot be read."""
        self._stale = True
        try:
            [group] = read_groups(self._path.with_name(name))
        except StoreError as error:
            self.damaged.append(str(error))
            return None
        except FileNotFoundError:
            return None
        entry = _entry(name, group)
        self._lines[entry.group_id] = _line(entry)
        unlisted.discard(name)
        return entry

    def has_file(self, name: str) -> bool:
        """Whether an intact file of that name exists whose group is not in the index."""
        if name not in self._unlisted:
            return False
        try:
            return bool(read_groups(self._path.with_name(name)))
        except (StoreError, FileNotFoundError):
            return False

    def _read(self, unlisted: set[str]) -> list[str | None]:
        """Read the lines whose files exist, and remove these files from `unlisted`. Return a group id for each line, ""
        if its file is gone, and None for damaged lines that name no group."""
        group_ids: list[str | None] = []
        damaged = b""
        if not self._path.exists():
            self._stale = bool(unlisted)
            return group_ids
        with open(self._path, "rb") as file:
            for line in file:
                try:
                    content, whole = _content(line)
                    entry = _parse(content)
                except (ValueError, TypeError):
                    damaged += line
                    continue
                if damaged:
                    group_ids += self._repair(damaged, unlisted)
                    damaged = b""
                if entry.file in unlisted:
                    self._lines[entry.group_id] = content
                    unlisted.discard(entry.file)
                    group_ids.append(entry.group_id)
                else:
                    group_ids.append("")
                self._stale = self._stale or not whole or not group_ids[-1]
        return [*group_ids, *self._repair(damaged, unlisted)] if damaged else group_ids

    def _repair(self, damaged: bytes, unlisted: set[str]) -> list[str | None]:
        """Read the files that damaged lines name, and return the ids of their groups in the same order."""
        self._stale = True
        names = [text.decode() for text in _NAMES.findall(damaged)]
        names = [name if name.startswith("part-") else part_name(name) for name in names]
        entries = [self._add_from_file(name, unlisted) for name in dict.fromkeys(names) if name in unlisted]
        return [entry.group_id for entry in entries if entry is not None] or [None]

    def append(self, file: str, group: RolloutGroup) -> None:
        """Add the group of a file that is on disk. If the line cannot be written now, `flush` writes it."""
        line = self._lines[group.group_id] = _line(_entry(file, group))
        if self._stale:
            return
        try:
            with open(self._path, "ab") as out:
                out.write(_with_checksum(line))
                self._unsynced = True
        except OSError:
            self._stale = True

    def flush(self) -> None:
        """Write the index to disk. Raises StoreError."""
        if self._stale:
            write_bytes(self._path, *map(_with_checksum, self._lines.values()))
        elif self._unsynced:
            _sync(self._path)
        self._stale = self._unsynced = False

    def __contains__(self, group_id: object) -> bool:
        return group_id in self._lines

    def __getitem__(self, group_id: str) -> GroupEntry:
        return _parse(self._lines[group_id])

    def __iter__(self) -> Iterator[GroupEntry]:
        return map(_parse, list(self._lines.values()))

    def __len__(self) -> int:
        return len(self._lines)

    def group_ids(self) -> list[str]:
        """Ids of the groups, in the order they sealed."""
        return list(self._lines)


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


def _with_checksum(content: bytes) -> bytes:
    """A line of the file, with its checksum."""
    return content + _CHECKSUM % zlib.crc32(content) + b"\n"


def _content(line: bytes) -> tuple[bytes, bool]:
    """Return the content of a line, and whether it has an end. Raises ValueError if it is damaged."""
    whole = line.endswith(b"\n")
    line = line.removesuffix(b"\n")
    content, checksum = line[:-_CHECKSUM_BYTES], line[-_CHECKSUM_BYTES:]
    if checksum != _CHECKSUM % zlib.crc32(content):
        raise ValueError("its checksum does not match")
    return content, whole


def _parse(line: bytes) -> GroupEntry:
    file, group_id, example_id, policy_version, uids = json.loads(line.decode())
    return GroupEntry(file, group_id, example_id, policy_version, tuple(uids))


def _entry(file: str, group: RolloutGroup) -> GroupEntry:
    if not group.group_id:
        raise StoreError(f"{file} contains a group that has not sealed; it was not written by this program")
    uids = tuple(rollout.uid for rollout in group.rollouts)
    return GroupEntry(file, group.group_id, group.example_id, group.policy_version, uids)


def _line(entry: GroupEntry) -> bytes:
    return json.dumps(entry, ensure_ascii=False, separators=(",", ":")).encode()


def _sync(path: Path) -> None:
    try:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    except OSError as error:
        raise StoreError(f"{path} cannot be written ({error.strerror or error}); check the free space there") from error
