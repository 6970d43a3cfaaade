"""The manifest of an archive: the files of a run, each bound to offsets of a topic.

The exclusive creation of the next generation is the commit point; a file counts only if the newest manifest names it. A
writer begins by creating a generation itself, so that the previous writer can no longer commit.
"""

import json
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

import msgspec

from rollstream.topics.errors import ConfigurationError, Fenced, StateRefused
from rollstream.topics.files.stores import Store

FORMAT = 1
LOG = "log"
"""Table of unchanged records, from which topics are restored."""
_KEPT = 2


@dataclass(frozen=True, kw_only=True)
class ArchivedFile:
    """A file with the rows of a partition's offsets from `begin` up to, but not including, `end`."""

    path: str
    table: str
    topic: str
    partition: int
    environment: str
    date: str
    begin: int
    end: int
    first: int
    """Offset of the first record with rows in the file."""
    last: int
    rows: int
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class ArchivedTopic:
    """Archived offsets of a topic, by partition: from `begin` up to, not including, `position`."""

    topic_id: str
    begin: Mapping[int, int]
    position: Mapping[int, int]


@dataclass(frozen=True, kw_only=True)
class ArchiveManifest:
    """One generation of the manifest."""

    run: str
    generation: int = 0
    writer: str = ""
    """Id of the writer that may write the next generation."""
    topics: Mapping[str, ArchivedTopic] = field(default_factory=dict)
    files: tuple[ArchivedFile, ...] = ()

    def files_of(self, table: str) -> list[ArchivedFile]:
        """Return the files of a table, by topic, partition and offset."""
        files = (file for file in self.files if file.table == table)
        return sorted(files, key=lambda f: (f.topic, f.partition, f.begin, f.first))

    def rows(self, table: str) -> int:
        """Return the number of rows of a table."""
        return sum(file.rows for file in self.files if file.table == table)

    def check(self) -> "ArchiveManifest":
        """Raise StateRefused unless file names are unique and within the run's folder, and the log is complete.

        The files of a partition may neither overlap nor leave gaps, nor end after its position, so no record is
        missing or archived twice. Returns the manifest.
        """
        if len({file.path for file in self.files}) != len(self.files):
            raise StateRefused(f"generation {self.generation} of the archive of run {self.run} names a file twice")
        for file in self.files:
            if not _is_within(file.path, folder_of(self.run)):
                raise StateRefused(
                    f"generation {self.generation} of the archive of run {self.run} names {file.path!r}, which is "
                    f"outside {folder_of(self.run)}; somebody changed it: archive to another place"
                )
        for name, topic in self.topics.items():
            if topic.begin.keys() != topic.position.keys() or min(topic.begin.values(), default=0) < 0:
                raise StateRefused(f"the offsets of {name} in the archive of run {self.run} are inconsistent")
        reached = {(name, p): at for name, topic in self.topics.items() for p, at in topic.begin.items()}
        for file in self.files_of(LOG):
            place = (file.topic, file.partition)
            if reached.get(place) != file.begin or not file.begin <= file.first <= file.last < file.end:
                raise StateRefused(
                    f"{file.path} begins at {file.begin}, but the files before it end at {reached.get(place)}"
                )
            reached[place] = file.end
        for (name, partition), at in reached.items():
            position = self.topics[name].position[partition]
            if at > position:
                raise StateRefused(f"files of {name}[{partition}] end at {at}, but the manifest says {position}")
        return self

    def to_json(self) -> bytes:
        """Encode for storage."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=0, sort_keys=True).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "ArchiveManifest":
        """Decode a stored manifest. Raises StateRefused if it is not a manifest, or has a newer format."""
        try:
            values: dict[str, Any] = json.loads(data)
            if values.pop("format") != FORMAT:
                raise StateRefused("the archive was written by a newer release; upgrade rollstream")
            return msgspec.convert(values, cls, str_keys=True)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, msgspec.ValidationError) as error:
            raise StateRefused(f"a manifest of the archive cannot be read: {error!r}") from error


def folder_of(run: str) -> str:
    """Return the folder of a run's files and manifests within the archive."""
    return f"run={run}"


def arrays_folder(run: str) -> str:
    """Return the folder of the stored arrays that archived records name. Its objects are in no manifest, because their
    names tell what they are."""
    return f"{folder_of(run)}/_arrays"


def _is_within(path: str, folder: str) -> bool:
    """Whether a name lies in a folder of the store, whatever file system interprets it."""
    parts = PurePosixPath(path).parts
    return (
        parts[:1] == (folder,)
        and len(parts) > 1
        and str(PurePosixPath(path)) == path
        and not {"..", "."} & {*parts}
        and not set(path) & {"\\", "\0"}
    )


def _manifests(run: str) -> str:
    # Readers of partitioned data sets ignore names that begin with an underscore.
    return f"{folder_of(run)}/_manifests"


def _name(run: str, generation: int) -> str:
    return f"{_manifests(run)}/{generation:012d}.json"


def _generations(store: Store, run: str) -> list[str]:
    """Return the names of the manifests of a run, in order."""
    return [name for name in store.names(_manifests(run)) if name.endswith(".json")]


def newest(store: Store, run: str) -> ArchiveManifest | None:
    """Return the current manifest of a run; None if it has no archive."""
    while True:
        names = _generations(store, run)
        if not names:
            return None
        try:
            return ArchiveManifest.from_json(store.read(names[-1])).check()
        except FileNotFoundError:  # The newest manifest was deleted after it was listed.
            continue


def existing(store: Store, run: str) -> ArchiveManifest:
    """Return the current manifest of a run. Raises ConfigurationError if the store has no archive of the run."""
    manifest = newest(store, run)
    if manifest is None:
        held = ", ".join(runs_of(store)) or "none"
        raise ConfigurationError(f"{store.url} holds no archive of run {run}; runs there: {held}")
    return manifest


def runs_of(store: Store) -> list[str]:
    """Return the runs in an archive."""
    heads = {name.split("/")[0] for name in store.names("") if "/_manifests/" in name}
    return sorted(head.removeprefix("run=") for head in heads)


def take_over(store: Store, run: str) -> ArchiveManifest:
    """Take over the current manifest with a new generation, so that the previous writer can no longer commit."""
    writer = uuid.uuid4().hex[:12]
    while True:
        before = newest(store, run) or ArchiveManifest(run=run)
        mine = replace(before, generation=before.generation + 1, writer=writer)
        if _claimed(store, mine):
            return mine


def commit(store: Store, manifest: ArchiveManifest) -> ArchiveManifest:
    """Commit a changed manifest as the next generation, and return it.

    Raises Fenced if another writer took over.
    """
    mine = replace(manifest, generation=manifest.generation + 1).check()
    if not _claimed(store, mine):
        raise _fenced(store, mine.run)
    for old in _generations(store, mine.run):
        if old < _name(mine.run, mine.generation - _KEPT + 1):
            store.delete(old)
    return mine


def sweep(store: Store, manifest: ArchiveManifest) -> int:
    """Delete files that the manifest does not name, left by a crash or replaced by compaction; return their number.

    Raises Fenced, and deletes nothing, if another writer took over.
    """
    named = {file.path for file in manifest.files}
    left = [
        name
        for name in store.names(folder_of(manifest.run))
        if name not in named and not name.startswith((_manifests(manifest.run), arrays_folder(manifest.run)))
    ]
    # Checked after the files are listed, so that no file of a later writer is among them.
    if not _is_newest(store, manifest):
        raise _fenced(store, manifest.run)
    for name in left:
        store.delete(name)
    return len(left)


def _claimed(store: Store, mine: ArchiveManifest) -> bool:
    """Create a generation; return whether it counts.

    A writer that was suspended may create a generation again that later writers created and deleted. It does not count,
    and is deleted.
    """
    name, data = _name(mine.run, mine.generation), mine.to_json()
    # If the response to a successful attempt was lost, a retry finds the same data.
    if not store.create(name, data) and not _holds(store, name, data):
        return False
    if _is_newest(store, mine):
        return True
    store.delete(name)
    return False


def _is_newest(store: Store, mine: ArchiveManifest) -> bool:
    return _generations(store, mine.run)[-1:] == [_name(mine.run, mine.generation)]


def _holds(store: Store, name: str, data: bytes) -> bool:
    try:
        return store.read(name) == data
    except FileNotFoundError:  # Later writers deleted it.
        return False


def _fenced(store: Store, run: str) -> Fenced:
    return Fenced(f"another process is archiving run {run} to {store.url}; the last files of this process are left out")
