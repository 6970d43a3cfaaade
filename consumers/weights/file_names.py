"""Names of the files that hold chunks of policy versions, and the rule for when chunks go to files. No I/O.

A name contains the run, the version, the number of the chunk and the BLAKE3 of the bytes. Therefore two publishers
never write different bytes under one name, a file belongs to one version, and its bytes can be checked against its
name.
"""

import re
from typing import NamedTuple

from rollstream.consumers.files.atomic_files import UNFINISHED
from rollstream.consumers.weights.config import WeightsConfig

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_NAME = re.compile(rf"(\d{{8,}})/(\d{{6,}})-([0-9a-f]{{64}})(\..*{re.escape(UNFINISHED)})?")


class ChunkFile(NamedTuple):
    """The parts of a name."""

    version: int
    chunk: int
    digest: str
    """BLAKE3 of the bytes as stored, hexadecimal."""
    whole: bool = True
    """False for a file that a killed publisher left half written, which nobody reads."""


def in_files(config: WeightsConfig, size_bytes: int) -> bool:
    """Whether the content of a version goes to files, given its size before compression."""
    if config.transport == "auto":
        return bool(config.url) and size_bytes > config.files_above_bytes
    return config.transport == "files"


def file_name(run: str, version: int, index: int, digest: str) -> str:
    """Return the name of a chunk's file, relative to learner.weights.url."""
    return f"{run}/{version:08d}/{index:06d}-{digest}"


def parsed(run: str, name: str) -> ChunkFile | None:
    """Return the parts of a name that `file_name` makes for the run, or of an unfinished file; None for others."""
    match = _NAME.fullmatch(name.removeprefix(f"{run}/")) if name.startswith(f"{run}/") else None
    return None if match is None else ChunkFile(int(match[1]), int(match[2]), match[3], match[4] is None)


def place_of(url: str) -> tuple[str, str]:
    """Return the URL of the store in which a file lies, and its name there."""
    root, *name = url.rsplit("/", 3)
    return root or "/", "/".join(name)


def root_of(run: str, url: str) -> str | None:
    """Return the URL of the store in which a file lies; None unless `file_name` makes the file's name for the run."""
    root, name = place_of(url)
    return None if parsed(run, name) is None else root


def folder_of(url: str) -> tuple[str, str] | None:
    """Return the URL of the store in which a file lies, and the run for which `file_name` makes the file's name; None
    if it makes the name for no run."""
    root, name = place_of(url)
    run = name.split("/")[0]
    return (root, run) if _RUN.fullmatch(run) and parsed(run, name) is not None else None
