"""Where a learner's checkpoints lie, on a local file system or at gs://, and which of them are complete. Needs no JAX.

Paths at a URL are those of etils.epath, which orbax writes with: joined with pathlib they would be a local folder.
"""

from pathlib import Path
from typing import cast

from topics.errors import ConfigurationError

META = "meta/metadata"
"""What orbax writes of the metadata, below the folder of a step."""
COMMITTED = "commit_success.txt"
"""Last file of a checkpoint where no rename makes it whole: in an object store."""
SCHEME = "gs://"
"""The one that orbax, too, has its arrays written to."""


def is_remote(directory: str | Path) -> bool:
    """Whether a directory of checkpoints is at a URL. Raises ConfigurationError for one that orbax cannot write to."""
    scheme, separator, _rest = str(directory).partition("://")
    if separator and f"{scheme}://" != SCHEME:
        raise ConfigurationError(
            f"learner.checkpoint.directory is {directory}; checkpoints lie in a local or mounted folder, or "
            f"at {SCHEME}BUCKET/FOLDER"
        )
    return bool(separator)


def learner_directory(directory: str, run: str, learner: str) -> Path:
    """Folder of one learner's checkpoints.

    Raises ConfigurationError where the URL is none that can be written, or its packages are not there.
    """
    return directory_of(directory) / run / learner


def directory_of(directory: str) -> Path:
    """A directory of checkpoints as an absolute path, or as a path at its URL. Raises as `learner_directory` does."""
    if not is_remote(directory):
        return Path(directory).absolute()
    try:
        import fsspec
        from etils import epath

        fsspec.get_filesystem_class("gcs")
    except ImportError as error:
        raise ConfigurationError(
            f"learner.checkpoint.directory is {directory}, and a package for that is missing ({error}); "
            "pip install 'rollstream[learner]' gcsfs google-cloud-storage"
        ) from error
    # It has pathlib's methods, over the object store.
    return cast(Path, epath.Path(directory))


def checkpoint_steps(directory: Path) -> list[int]:
    """Steps of the complete checkpoints of a learner, ascending; a save under way has another name, or no last file."""
    last = COMMITTED if is_remote(directory) else META
    folders = directory.iterdir() if directory.exists() else ()
    return sorted(int(path.name) for path in folders if path.name.isdecimal() and (path / last).exists())
