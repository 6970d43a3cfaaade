"""For tests of the archive without a broker: records, a store that stops as a killed process does, and archiving."""

from collections.abc import Callable
from typing import Literal

from rollstream.consumers.archive import manifest as manifests
from rollstream.consumers.archive.tables import ArchivedRecord
from rollstream.consumers.archive.writer import ArchiveWriter, records
from rollstream.topics.files.stores import Store
from rollstream.topics.records import Mark, Turn
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from tests.support.runs import rollout

DAY_MS = 86_400_000
Merging = Literal["never", "at once", "gradually"]


class Stopped(Exception):
    """Stands in for kill -9."""


class StoppingStore:
    """A store in memory that stops for good at the last of so many changes, which is then done or not."""

    url = "test"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.left, self.done_then = 10**9, False

    def stop_after(self, changes: int, done_then: bool) -> None:
        self.left, self.done_then = changes, done_then

    def _change(self, change: Callable[[], object]) -> None:
        if self.left <= 0:
            raise Stopped
        self.left -= 1
        if self.left == 0 and not self.done_then:
            raise Stopped
        change()
        if self.left == 0:
            raise Stopped

    def names(self, under: str) -> list[str]:
        return sorted(name for name in self.objects if name.startswith(under))

    def read(self, name: str) -> bytes:
        if name not in self.objects:
            raise FileNotFoundError(name)
        return self.objects[name]

    def write(self, name: str, data: bytes) -> None:
        self._change(lambda: self.objects.__setitem__(name, data))

    def create(self, name: str, data: bytes) -> bool:
        if name in self.objects:
            return False
        self.write(name, data)
        return True

    def delete(self, name: str) -> None:
        self._change(lambda: self.objects.pop(name, None))


def entry(partition: int, offset: int, kind: str = "rollout", timestamp_ms: int = DAY_MS) -> ArchivedRecord:
    """A record of `rollouts`: a rollout of one of two environments, a mark, a tombstone or poison."""
    if kind == "rollout":
        subject = rollout(f"e{offset}", offset, environment=f"env{offset % 2}", turns=(Turn(role="user", text="?"),))
        value: bytes | None = encode(subject)
    else:
        value = {"mark": encode(Mark(kind="deadline")), "poison": b"\xc3\x01 no record", "none": None}[kind]
    headers = ((("a", b"1"), ("a", None)),) if offset % 3 == 0 else (None,)
    return ArchivedRecord("rollouts", partition, offset, timestamp_ms, encode_key("env", offset), value, *headers)


def archive_all(store: Store, log: dict[int, list[ArchivedRecord]], at_once: int, compact: Merging) -> None:
    """Archive records as an archiver does, from the archive's end on."""
    writer = ArchiveWriter(store, "main")
    first = {p: entries[0].offset for p, entries in log.items()}
    at = writer.begin("rollouts", "id", first)
    waiting = [e for entries in log.values() for e in entries if e.offset >= at[e.partition]]
    for begin in range(0, len(waiting), at_once):
        for e in waiting[begin : begin + at_once]:
            writer.add(e)
            at[e.partition] = e.offset + 1
        writer.commit({("rollouts", p): offset for p, offset in at.items()})
        if compact != "never":
            writer.compact(gradually=compact == "gradually")


def held(store: Store, run: str = "main") -> dict[int, list[ArchivedRecord]]:
    current = manifests.newest(store, run)
    if current is None or "rollouts" not in current.topics:
        return {}
    return {p: list(records(store, current, "rollouts", p)) for p in current.topics["rollouts"].position}


LOG_OF_TWO = {p: [entry(p, offset) for offset in (3, 4, 7, 8, 9)] for p in range(2)}
