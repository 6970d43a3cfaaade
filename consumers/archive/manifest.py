"""The manifest: which files an archive of a run is made of, and which offsets of which topics each is bound to.

A new generation, created where none of its number is, is the commit point; a file counts only if the newest names it.
Whoever begins to write takes the next generation first, so that a writer it displaced cannot commit any more.
"""

import json
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from consumers.archive.store import Store
from topics.errors import Fenced, StateRefused

FORMAT = 1
LOG = "log"
"""Table of the records as they are; what archives are restored from."""
_KEPT = 2


@dataclass(frozen=True, kw_only=True)
class ArchivedFile:
    """A file, bound to what it was made of: offsets `begin` up to but not with `end` of a partition."""

    path: str
    table: str
    topic: str
    partition: int
    environment: str
    date: str
    begin: int
    end: int
    first: int
    """Offset of the first record that has rows in it."""
    last: int
    rows: int
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class ArchivedTopic:
    """How much of a topic is archived, by partition: from `begin` up to but not with `position`."""

    topic_id: str
    begin: Mapping[int, int]
    position: Mapping[int, int]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One generation."""

    run: str
    generation: int = 0
    writer: str = ""
    """Who may write the next generation."""
    topics: Mapping[str, ArchivedTopic] = field(default_factory=dict)
    files: tuple[ArchivedFile, ...] = ()

    def of(self, table: str) -> list[ArchivedFile]:
        """Files of a table, by topic, partition and offset."""
        found = (file for file in self.files if file.table == table)
        return sorted(found, key=lambda f: (f.topic, f.partition, f.begin, f.first))

    def rows(self, table: str) -> int:
        """Rows of a table."""
        return sum(file.rows for file in self.files if file.table == table)

    def check(self) -> "Manifest":
        """Raise StateRefused unless files have names of their own and the log's cover each partition without gap or
        overlap from where it begins to its position: no record missing, none doubled."""
        if len({file.path for file in self.files}) != len(self.files):
            raise StateRefused(f"generation {self.generation} of the archive of run {self.run} names a file twice")
        reached = {(name, p): at for name, topic in self.topics.items() for p, at in topic.begin.items()}
        for file in self.of(LOG):
            place = (file.topic, file.partition)
            if reached.get(place) != file.begin or not file.begin <= file.first <= file.last < file.end:
                raise StateRefused(
                    f"{file.path} begins at {file.begin}, the files before it end at {reached.get(place)}"
                )
            reached[place] = file.end
        for (name, partition), at in reached.items():
            position = self.topics[name].position[partition]
            if at > position:
                raise StateRefused(f"files of {name}[{partition}] end at {at}, the archive's position is {position}")
        return self

    def to_json(self) -> bytes:
        """As it is stored."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=0, sort_keys=True).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "Manifest":
        """Read it back. Raises StateRefused for what is none, or of a newer format."""
        try:
            values: dict[str, Any] = json.loads(data)
            if values.pop("format") != FORMAT:
                raise StateRefused("the archive was written by a newer release; upgrade rollstream")
            topics = {
                name: ArchivedTopic(
                    topic_id=of["topic_id"],
                    begin={int(p): at for p, at in of["begin"].items()},
                    position={int(p): at for p, at in of["position"].items()},
                )
                for name, of in values.pop("topics").items()
            }
            files = tuple(ArchivedFile(**file) for file in values.pop("files"))
            return cls(**values, topics=topics, files=files)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StateRefused(f"a manifest of the archive cannot be read: {error!r}") from error


def folder_of(run: str) -> str:
    """Where files and manifests of a run lie within the archive."""
    return f"run={run}"


def _manifests(run: str) -> str:
    # Readers of partitioned data sets pass over names that begin with an underscore.
    return f"{folder_of(run)}/_manifests"


def _name(run: str, generation: int) -> str:
    return f"{_manifests(run)}/{generation:012d}.json"


def newest(store: Store, run: str) -> Manifest | None:
    """The current manifest of a run; None where there is no archive of it."""
    while True:
        names = [name for name in store.names(_manifests(run)) if name.endswith(".json")]
        if not names:
            return None
        try:
            return Manifest.from_json(store.read(names[-1])).check()
        except FileNotFoundError:  # It was the newest when it was listed, and is old enough to be gone by now.
            continue


def runs_of(store: Store) -> list[str]:
    """Runs an archive holds."""
    heads = {name.split("/")[0] for name in store.names("") if "/_manifests/" in name}
    return sorted(head.removeprefix("run=") for head in heads)


def take_over(store: Store, run: str) -> Manifest:
    """The current manifest as a new generation of a writer of its own: who wrote before can no longer commit."""
    writer = uuid.uuid4().hex[:12]
    while True:
        before = newest(store, run) or Manifest(run=run)
        mine = replace(before, generation=before.generation + 1, writer=writer)
        if store.create(_name(run, mine.generation), mine.to_json()):
            return mine


def commit(store: Store, manifest: Manifest) -> Manifest:
    """Make `manifest`, changed since it was taken or committed, the newest. Returns it with its generation.

    Raises Fenced where another writer took over.
    """
    mine = replace(manifest, generation=manifest.generation + 1).check()
    data = mine.to_json()
    name = _name(mine.run, mine.generation)
    # A store may have taken it and the answer got lost: then it was tried twice.
    if not store.create(name, data) and store.read(name) != data:
        raise Fenced(
            f"another process archives run {mine.run} to {store.url} now; nothing of this one's last part counts"
        )
    for old in store.names(_manifests(mine.run)):
        if old < _name(mine.run, mine.generation - _KEPT + 1):
            store.delete(old)
    return mine


def sweep(store: Store, manifest: Manifest, also: Iterable[str] = ()) -> int:
    """Delete files that no manifest names, left by a crash or replaced by compaction; returns how many."""
    named = {file.path for file in manifest.files}.union(also)
    left = [
        name
        for name in store.names(folder_of(manifest.run))
        if name not in named and not name.startswith(_manifests(manifest.run))
    ]
    for name in left:
        store.delete(name)
    return len(left)
