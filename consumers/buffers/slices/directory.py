"""The manifest of a slice buffer's directory: a small JSON file that names the files of the buffer.

No file name is used twice, so replacing the manifest replaces the whole buffer.
"""

import re
import uuid
from dataclasses import dataclass
from pathlib import Path

from rollstream.consumers.buffers.slices.ring_files import ArraySpec
from rollstream.consumers.files.atomic_files import StoreError, read_json, remove_unfinished, write_json
from rollstream.topics.errors import RecordError
from rollstream.topics.wire.trajectory_arrays import nest

NAME = "slices.json"
LOCK = "lock"
_VERSION = 1
_FILE = re.compile(r"[\w-]{1,64}\.(journal|bin)", re.ASCII)
_WRITTEN = re.compile(r"[0-9a-f]{12}(\.journal|-\d{3,}\.bin)", re.ASCII)
"""Names that buffers give to their files; other files in a directory belong to the user."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The files of a buffer."""

    journal: str
    capacity: int
    """Number of steps in the ring."""
    arrays: tuple[ArraySpec, ...] = ()
    """Empty before the first episode."""


def new_name() -> str:
    """Return a new prefix for file names."""
    return uuid.uuid4().hex[:12]


def read_manifest(directory: Path) -> Manifest | None:
    """Read the manifest; return None if there is none. Raises StoreError if this program did not write it."""
    try:
        value = read_json(directory / NAME)
        if value["version"] != _VERSION:
            raise ValueError(f"version {value['version']}")
        manifest = Manifest(
            journal=str(value["journal"]),
            capacity=int(value["capacity"]),
            arrays=tuple(ArraySpec.from_dict(spec) for spec in value["arrays"]),
        )
        for name in (manifest.journal, *(spec.file for spec in manifest.arrays)):
            if not _FILE.fullmatch(name):
                raise ValueError(f"{name[:80]!r} is not the name of a buffer file")
        nest({spec.path: spec for spec in manifest.arrays})
        return manifest
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError, OverflowError, RecordError) as error:
        raise StoreError(
            f"{directory / NAME} was not written by this program ({error!r}); fill another directory from the log"
        ) from error


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Replace the manifest, and with it the files of the buffer. Raises StoreError."""
    value = {
        "version": _VERSION,
        "capacity": manifest.capacity,
        "journal": manifest.journal,
        "arrays": [spec.as_dict() for spec in manifest.arrays],
    }
    write_json(directory / NAME, value)


def remove_all_but(directory: Path, manifest: Manifest) -> None:
    """Delete files of a buffer that the manifest does not name, left by an unfinished copy or by earlier content.

    Only the directory's one writer may call this.
    """
    remove_unfinished(directory)
    named = {manifest.journal, *(spec.file for spec in manifest.arrays)}
    for path in directory.iterdir():
        if _WRITTEN.fullmatch(path.name) and path.name not in named:
            path.unlink(missing_ok=True)


def boot_id() -> str:
    """Id of this boot of the machine; "" if the system does not report one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
