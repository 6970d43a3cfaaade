"""Files of a tracker with later steps than a run has: they belong to an earlier run of the same name."""

import itertools
import logging
from pathlib import Path

from rollstream.topics.logs import event

logger = logging.getLogger(__name__)


def put_aside(path: Path, last: int, newest_step: int) -> None:
    """Rename a file whose last step is later than the newest step of the run."""
    earlier = list(path.parent.glob(f"{path.name}.*"))
    # Some of the earlier files may have been deleted, and renaming would replace a file.
    names = (path.with_name(f"{path.name}.{number}") for number in itertools.count(len(earlier) + 1))
    path.rename(next(name for name in names if not name.exists()))
    note_new_beginning(path, last, newest_step)


def note_new_beginning(path: Path, last: int, newest_step: int) -> None:
    """Log that a tracker begins anew."""
    event(
        logger, "tracker_begun_anew", level=logging.WARNING, path=str(path), held_step=last, recorded_step=newest_step
    )
