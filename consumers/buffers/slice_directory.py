"""What lies in a slice buffer's directory: which files count, and who may write there.

A small JSON file names those that count, and no name is used twice: so a whole buffer is replaced by replacing that
file.
"""

import uuid
from dataclasses import dataclass
from pathlib import Path

from consumers.buffers.files import StoreError, read_json, remove_unfinished, write_json
from consumers.buffers.slice_files import ArraySpec
from topics.errors import RecordError

NAME = "slices.json"
LOCK = "lock"
_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Which files make up a buffer."""

    journal: str
    capacity: int
    """Steps of the ring."""
    arrays: tuple[ArraySpec, ...] = ()
    """None before the first episode."""


def new_name() -> str:
    """Beginning of names that no file there has."""
    return uuid.uuid4().hex[:12]


def read_manifest(directory: Path) -> Manifest | None:
    """What counts there; None where there is nothing. Raises StoreError for what is not of this program."""
    try:
        value = read_json(directory / NAME)
        if value["version"] != _VERSION:
            raise ValueError(f"version {value['version']}")
        return Manifest(
            journal=str(value["journal"]),
            capacity=int(value["capacity"]),
            arrays=tuple(ArraySpec.of_dict(spec) for spec in value["arrays"]),
        )
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError, RecordError) as error:
        raise StoreError(
            f"{directory / NAME} is not this program's ({error!r}); fill another directory from the log"
        ) from error


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Have these files count from now on. Raises StoreError."""
    value = {
        "version": _VERSION,
        "capacity": manifest.capacity,
        "journal": manifest.journal,
        "arrays": [spec.as_dict() for spec in manifest.arrays],
    }
    write_json(directory / NAME, value)


def remove_all_but(directory: Path, manifest: Manifest) -> None:
    """Delete files that do not count: a copy that was not finished left them, or one that took their place.

    Only for who alone writes there.
    """
    remove_unfinished(directory)
    named = {manifest.journal, *(spec.file for spec in manifest.arrays)}
    for path in [*directory.glob("*.journal"), *directory.glob("*.bin")]:
        if path.name not in named:
            path.unlink(missing_ok=True)


def boot() -> str:
    """Names this start of the machine; the same for all starts where there is no such name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
