"""The adapter that a vLLM server loads: its path stays the same; its files are replaced while the engine is paused."""

import hashlib
import os
import shutil
import uuid
from pathlib import Path


def replace_adapter(directory: Path, url: str) -> Path:
    """Put the files of `directory` at the path of the engine at `url`, and return that path.

    The path is a symbolic link next to `directory`, replaced atomically. It points to hard links or copies for
    this engine alone, because other engines may have other versions. These files stay when `directory` is removed.
    Raises OSError.
    """
    path = directory.parent / f"adapter-{hashlib.sha256(url.encode()).hexdigest()[:12]}"
    files = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    shutil.copytree(directory, files, copy_function=_link)
    link = files.with_name(f"{files.name}.link")
    link.symlink_to(files.name)
    link.replace(path)
    for earlier in path.parent.glob(f"{path.name}.*"):
        if earlier != files:
            shutil.rmtree(earlier, ignore_errors=True)
    return path


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # A file system without hard links.
        shutil.copyfile(source, target)
