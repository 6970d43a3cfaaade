"""Installed distributions that rollstream needs with the requested extras, and the files of each."""

from collections.abc import Collection, Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = "rollstream"
# Installers write these files, which name paths of this machine or list files that are not copied.
_LEFT_OUT = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json", "uv_build.json"}


def needed_distributions(extras: Collection[str]) -> list[Distribution]:
    """Return rollstream and every distribution it needs with these extras, sorted by name.

    Raises PackageNotFoundError if one is not installed.
    """
    chosen: dict[str, Distribution] = {}
    followed: set[tuple[str, str]] = set()
    waiting = [(ROOT, extra) for extra in ("", *extras)]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in followed:
            continue
        followed.add((name, extra))
        chosen[name] = distribution(name)
        for line in chosen[name].requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                waiting.extend((canonicalize_name(requirement.name), inner) for inner in ("", *requirement.extras))
    return [chosen[name] for name in sorted(chosen)]


def installed_files(installed: Distribution) -> Iterator[tuple[PurePosixPath, Path]]:
    """Yield the files of a distribution: the path below site-packages, and the file on this machine.

    Its programs, its bytecode and the installer's notes are left out.
    """
    for path in installed.files or ():
        if _is_kept(path):
            source = Path(str(path.locate()))
            if source.is_file():
                yield PurePosixPath(path), source


def own_files(package: Path, metadata: Distribution) -> Iterator[tuple[PurePosixPath, Path]]:
    """Yield the files of rollstream, from a checkout or an installation, as an installed wheel would have them."""
    for source in sorted(_walk(package)):
        yield PurePosixPath(ROOT, source.relative_to(package).as_posix()), source
    yield from ((path, source) for path, source in installed_files(metadata) if path.parts[0].endswith(".dist-info"))


def _walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_dir():
            if path.name != "__pycache__":
                yield from _walk(path)  # also through the links of a checkout
        elif not path.name.startswith("."):
            yield path


def _is_kept(path: PurePosixPath) -> bool:
    return (
        ".." not in path.parts
        and "__pycache__" not in path.parts
        and not (path.parent.name.endswith(".dist-info") and path.name in _LEFT_OUT)
    )
