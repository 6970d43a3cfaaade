"""Paths of a learner's checkpoints, local or at gs://, which are complete, and the position in the log that each has.

Needs no JAX. Paths at a URL are etils.epath paths, as in orbax; pathlib would turn the URL into a local folder.
"""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from rollstream.topics.errors import ConfigurationError
from rollstream.topics.records import LearnerStep

META = "meta/metadata"
"""Metadata file that orbax writes, below the folder of a step."""
COMMITTED = "commit_success.txt"
"""File that orbax writes last to an object store, which has no atomic rename."""
SCHEME = "gs://"
"""The only URL scheme to which orbax can write arrays."""
_LEARNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def is_remote(directory: str | Path) -> bool:
    """Whether a checkpoint directory is a URL. Raises ConfigurationError for a URL that orbax cannot write to."""
    scheme, separator, _rest = str(directory).partition("://")
    if separator and f"{scheme}://" != SCHEME:
        raise ConfigurationError(
            f"learner.checkpoint.directory is {directory}; give a local or mounted folder, or {SCHEME}BUCKET/FOLDER"
        )
    return bool(separator)


def check_learner_name(name: str) -> None:
    """Raise ConfigurationError unless a learner's name can name a folder; a name read from the log may be a path."""
    if not _LEARNER.fullmatch(name):
        raise ConfigurationError(
            f"learner.name is {name!r}; give 1 to 100 letters, digits, '.', '_' and '-', starting with a letter or "
            "a digit, because the folder of the checkpoints has this name"
        )


def learner_directory(directory: str, run: str, learner: str) -> Path:
    """Folder of one learner's checkpoints.

    Raises ConfigurationError if the name cannot name a folder, the URL cannot be written to, or packages that the URL
    needs are missing.
    """
    check_learner_name(learner)
    return directory_of(directory) / run / learner


def directory_of(directory: str) -> Path:
    """A checkpoint directory as an absolute path, or as a path at its URL. Raises ConfigurationError for a bad URL."""
    if not is_remote(directory):
        return Path(directory).absolute()
    try:
        import fsspec
        from etils import epath

        fsspec.get_filesystem_class("gcs")
    except ImportError as error:
        raise ConfigurationError(
            f"learner.checkpoint.directory is {directory}, but a package that it needs is missing ({error}); "
            "pip install 'rollstream[learner]' gcsfs google-cloud-storage"
        ) from error
    # An epath path has the methods of a pathlib path.
    return cast(Path, epath.Path(directory))


def checkpoint_steps(directory: Path) -> list[int]:
    """Steps of the complete checkpoints of a learner, ascending.

    An unfinished checkpoint has another name, or lacks the file that is written last.
    """
    last = COMMITTED if is_remote(directory) else META
    folders = directory.iterdir() if directory.exists() else ()
    return sorted(int(path.name) for path in folders if path.name.isdecimal() and (path / last).exists())


def first_needed(directory: Path) -> int | None:
    """First offset of batch-index that a learner reads if it resumes from its oldest complete checkpoint; None without
    a complete checkpoint. A checkpoint that is deleted in the meantime does not count.
    """
    offsets = []
    for step in checkpoint_steps(directory):
        try:
            meta = json.loads((directory / str(step) / META).read_text())
        except FileNotFoundError:
            continue
        oldest = int(meta["oldest"])  # oldest offset in a rollout buffer
        offsets.append(int(meta["position"]) if oldest < 0 else oldest)
    return min(offsets, default=None)


@dataclass(frozen=True, kw_only=True)
class LearnerPosition:
    """Position of a learner in the log, with its totals and recent steps."""

    position: int = 0
    """Next offset of batch-index to read."""
    trained_total: int = 0
    """Rollouts trained on since the start of the run."""
    skipped_total: int = 0
    """Rollouts skipped since the start of the run."""
    oldest: int = -1
    """First offset before `position` whose batch may be used again; -1 if there is none."""
    recent_steps: tuple[LearnerStep, ...] = ()
    """Records of the steps since the previous checkpoint, which a resumed learner writes again."""

    def after(self, record: LearnerStep) -> "LearnerPosition":
        """Return the position after this step, with its record among the recent steps."""
        return LearnerPosition(
            position=record.position,
            trained_total=record.trained_total,
            skipped_total=record.skipped_total,
            oldest=record.oldest,
            recent_steps=(*self.recent_steps, record),
        )

    def saved(self) -> "LearnerPosition":
        """Return the position as it is after a checkpoint, without recent steps."""
        return replace(self, recent_steps=())
