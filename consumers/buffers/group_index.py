"""The index of sealed groups: a line for each, appended once its file is on disk, so that it names nothing that is not
there.

It spares reading every file when a store is opened. A torn last line, a file it lacks or one that is gone is mended
from the folder, which is what counts.
"""

import json
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from consumers.buffers.files import StoreError, write_bytes
from consumers.buffers.group_files import RolloutGroup, read_groups

_NAME = "groups.jsonl"


class Entry(NamedTuple):
    """A sealed group on disk."""

    file: str
    group_id: str
    example_id: str
    policy_version: int
    uids: tuple[str, ...]


class GroupIndex:
    """Entries by group id, in the order the groups sealed. Not safe from several threads by itself."""

    def __init__(self, directory: Path, count: int = -1) -> None:
        """Of the first `count` groups alone, where it is not negative: for who will seal the others again."""
        self._path = directory / _NAME
        self._lines: dict[str, bytes] = {}
        """Lines by group id: an entry as Python objects takes three times as much memory."""
        self._stale = False
        """Whether the file does not say what the index says."""
        self._unsynced = False
        self.damaged: list[str] = []
        """What is wrong with files that the index lacks and that cannot be read; the others count."""
        there = _parts(directory)
        if not self._read(there):
            self._stale = True
        if 0 <= count <= len(self._lines):
            self._stale = self._stale or count < len(self._lines)
            for group_id in list(self._lines)[count:]:
                there.add(_parsed(self._lines.pop(group_id)).file)
        else:
            for name in sorted(there):
                self._stale = True
                try:
                    [group] = read_groups(directory / name)
                except StoreError as error:
                    self.damaged.append(str(error))
                    continue
                except FileNotFoundError:
                    continue
                self._lines[group.group_id] = _line(_entry(name, group))
                there.discard(name)
        self._others = there

    def has_file(self, name: str) -> bool:
        """Whether a whole file of that name was there, of a group the index does not count."""
        if name not in self._others:
            return False
        try:
            return bool(read_groups(self._path.with_name(name)))
        except (StoreError, FileNotFoundError):
            return False

    def _read(self, there: set[str]) -> bool:
        """Take the lines that name what is there, out of it; whether that was all of them."""
        try:
            lines = self._path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return not there
        whole = lines.pop() == b""
        for line in lines:
            try:
                entry = _parsed(line)
            except (ValueError, TypeError):
                whole = False
                continue
            if entry.file in there:
                self._lines[entry.group_id] = line
                there.discard(entry.file)
            else:
                whole = False
        return whole

    def append(self, file: str, group: RolloutGroup) -> None:
        """Add the group of a file that is on disk. What cannot be written now is written by `flush`."""
        line = self._lines[group.group_id] = _line(_entry(file, group))
        if self._stale:
            return
        try:
            with open(self._path, "ab") as out:
                out.write(line + b"\n")
                self._unsynced = True
        except OSError:
            self._stale = True

    def flush(self) -> None:
        """Have the file on disk, saying what the index says. Raises StoreError."""
        if self._stale:
            write_bytes(self._path, *(line + b"\n" for line in self._lines.values()))
        elif self._unsynced:
            _sync(self._path)
        self._stale = self._unsynced = False

    def __contains__(self, group_id: object) -> bool:
        return group_id in self._lines

    def __getitem__(self, group_id: str) -> Entry:
        return _parsed(self._lines[group_id])

    def __iter__(self) -> Iterator[Entry]:
        return map(_parsed, list(self._lines.values()))

    def __len__(self) -> int:
        return len(self._lines)

    def group_ids(self) -> list[str]:
        """Ids of the groups, in the order they sealed."""
        return list(self._lines)


class KnownUids:
    """The uids of rollouts that a store has: of those that lay on disk when it was opened their hashes, which lead to
    their groups, where the uids themselves are compared. Not safe from several threads by itself."""

    def __init__(self, index: GroupIndex) -> None:
        self._index = index
        self._group_ids = index.group_ids()
        self._new: set[str] = set()
        hashes, counts = array("q"), array("q")
        for entry in index:
            hashes.extend(map(hash, entry.uids))
            counts.append(len(entry.uids))
        found = np.frombuffer(hashes, np.int64) if hashes else np.empty(0, np.int64)
        order = np.argsort(found, kind="stable")
        self._hashes = found[order]
        self._groups = np.repeat(np.arange(len(counts), dtype=np.int32), counts)[order]

    def add(self, uid: str) -> None:
        """Have another."""
        self._new.add(uid)

    def __contains__(self, uid: str) -> bool:
        if uid in self._new:
            return True
        begin, end = (int(np.searchsorted(self._hashes, hash(uid), side)) for side in ("left", "right"))
        return any(uid in self._index[self._group_ids[int(group)]].uids for group in self._groups[begin:end])


def _parts(directory: Path) -> set[str]:
    """Names of the files of groups in a directory, which need not be there."""
    try:
        with os.scandir(directory) as found:
            return {item.name for item in found if item.name.startswith("part-") and item.name.endswith(".parquet")}
    except FileNotFoundError:
        return set()


def _parsed(line: bytes) -> Entry:
    file, group_id, example_id, policy_version, uids = json.loads(line.decode())
    return Entry(file, group_id, example_id, policy_version, tuple(uids))


def _entry(file: str, group: RolloutGroup) -> Entry:
    if not group.group_id:
        raise StoreError(f"{file} holds a group that has not sealed; it was not written by this program")
    uids = tuple(rollout.uid for rollout in group.rollouts)
    return Entry(file, group.group_id, group.example_id, group.policy_version, uids)


def _line(entry: Entry) -> bytes:
    return json.dumps(entry, ensure_ascii=False, separators=(",", ":")).encode()


def _sync(path: Path) -> None:
    try:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    except OSError as error:
        raise StoreError(f"{path} cannot be written ({error.strerror or error}); look at the space there") from error
