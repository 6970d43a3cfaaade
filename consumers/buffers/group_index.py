"""The index of sealed groups: a line for each, appended once its file is on disk, so that it names nothing that is not
there.

It spares reading every file when a store is opened. A torn last line, a file it lacks or one that is gone is mended
from the folder, which is what counts.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

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
        self._entries: dict[str, Entry] = {}
        self._stale = False
        """Whether the file does not say what the index says."""
        self._unsynced = False
        self.damaged: list[str] = []
        """What is wrong with files that the index lacks and that cannot be read; the others count."""
        there = {path.name for path in directory.glob("part-*.parquet")}
        if not self._read(there):
            self._stale = True
        if 0 <= count <= len(self._entries):
            self._stale = self._stale or count < len(self._entries)
            self._entries = dict(list(self._entries.items())[:count])
        else:
            for name in sorted(there - {entry.file for entry in self._entries.values()}):
                self._stale = True
                try:
                    [group] = read_groups(directory / name)
                except StoreError as error:
                    self.damaged.append(str(error))
                    continue
                except FileNotFoundError:
                    continue
                self._entries[group.group_id] = _entry(name, group)
        self._others = there - {entry.file for entry in self._entries.values()}

    def has_file(self, name: str) -> bool:
        """Whether a whole file of that name was there, of a group the index does not count."""
        if name not in self._others:
            return False
        try:
            return bool(read_groups(self._path.with_name(name)))
        except (StoreError, FileNotFoundError):
            return False

    def _read(self, there: set[str]) -> bool:
        """Take the lines that name what is there; whether that was all of them."""
        try:
            lines = self._path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return not there
        whole = lines.pop() == b""
        for line in lines:
            try:
                file, group_id, example_id, policy_version, uids = json.loads(line)
            except ValueError:
                whole = False
                continue
            if file in there:
                self._entries[group_id] = Entry(file, group_id, example_id, policy_version, tuple(uids))
            else:
                whole = False
        return whole

    def append(self, file: str, group: RolloutGroup) -> None:
        """Add the group of a file that is on disk. What cannot be written now is written by `flush`."""
        entry = _entry(file, group)
        self._entries[group.group_id] = entry
        if self._stale:
            return
        try:
            with open(self._path, "ab") as out:
                out.write(_line(entry))
                self._unsynced = True
        except OSError:
            self._stale = True

    def flush(self) -> None:
        """Have the file on disk, saying what the index says. Raises StoreError."""
        if self._stale:
            write_bytes(self._path, *map(_line, self))
        elif self._unsynced:
            _sync(self._path)
        self._stale = self._unsynced = False

    def __contains__(self, group_id: object) -> bool:
        return group_id in self._entries

    def __getitem__(self, group_id: str) -> Entry:
        return self._entries[group_id]

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def __len__(self) -> int:
        return len(self._entries)


def _entry(file: str, group: RolloutGroup) -> Entry:
    if not group.group_id:
        raise StoreError(f"{file} holds a group that has not sealed; it was not written by this program")
    uids = tuple(rollout.uid for rollout in group.rollouts)
    return Entry(file, group.group_id, group.example_id, group.policy_version, uids)


def _line(entry: Entry) -> bytes:
    return json.dumps(entry, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _sync(path: Path) -> None:
    try:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    except OSError as error:
        raise StoreError(f"{path} cannot be written ({error.strerror or error}); look at the space there") from error
