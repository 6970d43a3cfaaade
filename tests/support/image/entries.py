"""Entries of an image, one for each path, and the shared libraries of this machine that its programs need."""

import io
import subprocess
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

USER_ID = 1000
"""User that containers run as, and the owner of the folders they write to."""


@dataclass(frozen=True)
class ImageEntry:
    """One path of the image: a file if it has `data` or `source`, a link if it has `link`, otherwise a directory."""

    path: str
    """Absolute path in the image."""
    data: bytes | None = None
    source: Path | None = None
    """File on this machine that has the content, which is read when the image is written."""
    link: str | None = None
    mode: int = 0o755
    user_id: int = 0


def file_entry(path: str, source: Path, mode: int = 0o644) -> ImageEntry:
    """Return the entry of a copy of `source` at `path`."""
    return ImageEntry(path, source=source, mode=mode)


def with_parents(entries: Iterable[ImageEntry]) -> list[ImageEntry]:
    """Return the entries and the directories above them, one for each path, sorted by path.

    The later of two entries with the same path is kept.
    """
    by_path = {entry.path: entry for entry in entries}
    parents = {str(parent) for path in by_path for parent in Path(path).parents} - by_path.keys() - {"/"}
    return [by_path.get(path, ImageEntry(path)) for path in sorted([*by_path, *parents])]


def account_files(user: str, home: str) -> tuple[ImageEntry, ...]:
    """Return the files that name the accounts of the image: root, and `user` with the id USER_ID."""
    texts = {
        "/etc/passwd": f"root:x:0:0::/:/bin/sh\n{user}:x:{USER_ID}:{USER_ID}::{home}:/bin/sh\n",
        "/etc/group": f"root:x:0:\n{user}:x:{USER_ID}:\n",
        # Without this file, the C library asks DNS for localhost.
        "/etc/nsswitch.conf": "hosts: files dns\n",
    }
    return tuple(ImageEntry(path, text.encode(), mode=0o644) for path, text in texts.items())


def needed_libraries(path: Path) -> dict[str, Path | None]:
    """Return the shared libraries a file needs, by name, with the host's file if any; empty for a static file."""
    answer = subprocess.run(["ldd", str(path)], capture_output=True, text=True, timeout=60)
    libraries: dict[str, Path | None] = {}
    for line in answer.stdout.splitlines():
        name, _, where = line.strip().partition(" => ")
        where = where.partition(" (")[0]
        if not where and name.startswith("/"):  # the loader itself
            loader = Path(name.partition(" (")[0])
            libraries[loader.name] = loader
        elif where:
            libraries[name] = Path(where) if where.startswith("/") else None
    return libraries


def write_layer(stream: IO[bytes], entries: Iterable[ImageEntry]) -> None:
    """Write the image's files as one tar; a copy keeps its file's time, which Python compares with its bytecode's."""
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry in entries:
            info = tarfile.TarInfo(entry.path.removeprefix("/"))
            info.mode, info.uid, info.gid = entry.mode, entry.user_id, entry.user_id
            if entry.source is not None:
                status = entry.source.stat()
                info.size, info.mtime = status.st_size, int(status.st_mtime)
                with entry.source.open("rb") as data:
                    archive.addfile(info, data)
            elif entry.data is not None:
                info.size = len(entry.data)
                archive.addfile(info, io.BytesIO(entry.data))
            else:
                info.type = tarfile.DIRTYPE if entry.link is None else tarfile.SYMTYPE
                info.linkname = entry.link or ""
                archive.addfile(info)
