"""Contents of rollstream's image: Python, the C library, rollstream, its requirements.

Every file comes from this machine, so that no registry and no package index is needed. An image of Python alone is a
base for the Dockerfile.
"""

import re
import shutil
import sys
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution
from importlib.util import cache_from_source
from pathlib import Path

import rollstream
from tests.support.image.distributions import ROOT, installed_files, needed_distributions, own_files
from tests.support.image.entries import (
    USER_ID,
    ImageEntry,
    account_files,
    file_entry,
    needed_libraries,
    with_parents,
)

HOME = "/var/lib/rollstream"
"""The folder for files of a run. Roles write to no other folder except /tmp."""
PYTHON = "/opt/python"
VENV = "/opt/rollstream"
_VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
# Parts of the standard library that no role imports: tests, graphics, files for embedding.
_LEFT_OUT = {"test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "site-packages", "dist-packages"}
_INSTALLER = {"ensurepip"}
_GRAPHICS = re.compile(r"^(_tkinter|_ctypes_test|_test\w*|xxlimited\w*)\.")
_APPLETS = (
    *("sh", "cat", "chmod", "chown", "cp", "echo", "env", "grep", "id", "kill", "ls", "mkdir", "mv", "ps", "rm", "sed"),
    *("sleep", "test"),
)
# ldd does not find these: the C library opens them at run time, or packages that are installed later need them.
_C_LIBRARY_PARTS = (
    *("libnss_dns.so.2", "libnss_files.so.2", "libresolv.so.2", "libdl.so.2", "libpthread.so.0", "librt.so.1"),
    *("libm.so.6", "libgcc_s.so.1", "libstdc++.so.6"),
)
PROGRAM = f"""\
#!{VENV}/bin/python -P
import sys

from rollstream.pipeline.command_line.entry import main

if __name__ == "__main__":
    sys.exit(main())
"""
"""The command in the image. Child processes import it, too, and must not run `main`."""


@dataclass(frozen=True)
class ApplicationInputs:
    """Programs and packages of this machine that the image is built from."""

    python: Path
    """The interpreter itself, not the link to it in a virtual environment."""
    standard_library: Path
    distributions: tuple[Distribution, ...]
    busybox: Path | None
    """Provides a shell for people who inspect a container; roles do not need it."""


def find_application_inputs(extras: Sequence[str]) -> ApplicationInputs:
    """Find all inputs. Raises PackageNotFoundError if a distribution is missing."""
    busybox = shutil.which("busybox")
    usable = busybox is not None and not needed_libraries(Path(busybox))
    return ApplicationInputs(
        python=Path(sys.executable).resolve(),
        standard_library=Path(sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix})),
        distributions=tuple(needed_distributions(extras)),
        busybox=Path(busybox) if busybox is not None and usable else None,
    )


def application_entries(inputs: ApplicationInputs) -> list[ImageEntry]:
    """Return all entries of the image, sorted by path."""
    packages = list(_packages(inputs.distributions, f"{VENV}/lib/{_VERSION}/site-packages"))
    own = [
        *packages,
        *_virtual_environment(),
        ImageEntry(HOME, user_id=USER_ID),
    ]
    return _with_python(inputs, _INSTALLER, own)


def python_entries(inputs: ApplicationInputs) -> list[ImageEntry]:
    """Return the entries of an image of Python alone, with its package installer, sorted by path."""
    return _with_python(inputs, set(), [])


def _with_python(inputs: ApplicationInputs, left_out: Collection[str], own: Sequence[ImageEntry]) -> list[ImageEntry]:
    library = list(_standard_library(inputs.standard_library, f"{PYTHON}/lib/{_VERSION}", left_out))
    programs = [
        file_entry(f"{PYTHON}/bin/{_VERSION}", inputs.python, 0o755),
        *(ImageEntry(f"{PYTHON}/bin/{name}", link=_VERSION) for name in ("python", "python3")),
        *_shell(inputs.busybox),
    ]
    entries = [*library, *programs, *own]
    certificates = Path(CERTIFICATES)
    return with_parents(
        [
            *entries,
            *_bytecode(entries),
            *_libraries([e for e in entries if ".so" in Path(e.path).name or (e.source and e.mode == 0o755)]),
            *account_files("rollstream", HOME),
            *([file_entry(CERTIFICATES, certificates.resolve())] if certificates.exists() else ()),
            *(ImageEntry(path, mode=0o1777) for path in ("/tmp", "/var/tmp")),
        ]
    )


def _standard_library(folder: Path, target: str, left_out: Collection[str]) -> Iterator[ImageEntry]:
    for path in sorted(folder.rglob("*")):
        below = path.relative_to(folder)
        kept = below.parts[0] not in left_out and not _LEFT_OUT.intersection(below.parts)
        if (
            kept
            and "__pycache__" not in below.parts
            and not below.parts[0].startswith("config-")
            and path.is_file()
            and not _GRAPHICS.match(path.name)
        ):
            yield file_entry(f"{target}/{below}", path)


def _bytecode(entries: Sequence[ImageEntry]) -> Iterator[ImageEntry]:
    """Yield the bytecode that this machine has of the modules, because a read-only container cannot write any."""
    for entry in entries:
        if entry.source is not None and entry.path.endswith(".py"):
            cached = Path(cache_from_source(str(entry.source)))
            if cached.exists():
                yield file_entry(f"{Path(entry.path).parent}/__pycache__/{cached.name}", cached)


def _packages(distributions: Sequence[Distribution], target: str) -> Iterator[ImageEntry]:
    package = Path(rollstream.__path__[0])
    for installed in distributions:
        is_own = installed.metadata["Name"] == ROOT
        files = own_files(package, installed) if is_own else installed_files(installed)
        for path, source in sorted(files, key=lambda item: item[0]):
            yield file_entry(f"{target}/{path}", source)


def _virtual_environment() -> Iterator[ImageEntry]:
    """Yield the files of a virtual environment, by which Python finds the packages."""
    text = f"home = {PYTHON}/bin\ninclude-system-site-packages = false\n"
    yield ImageEntry(f"{VENV}/pyvenv.cfg", text.encode(), mode=0o644)
    for name in ("python", "python3", _VERSION):
        yield ImageEntry(f"{VENV}/bin/{name}", link=f"{PYTHON}/bin/{_VERSION}")
    yield ImageEntry(f"{VENV}/bin/{ROOT}", PROGRAM.encode())


def _shell(busybox: Path | None) -> Iterator[ImageEntry]:
    if busybox is not None:
        yield file_entry("/bin/busybox", busybox, 0o755)
        yield from (ImageEntry(f"/bin/{name}", link="busybox") for name in _APPLETS)


def _libraries(natives: Sequence[ImageEntry]) -> Iterator[ImageEntry]:
    """Yield the libraries of this machine that the files need and no package includes.

    Libraries in the loader's own folders keep their paths; all others are placed in Python's folder of libraries.
    """
    brought = {entry.source.resolve() for entry in natives if entry.source is not None}
    needed: dict[str, Path] = {}
    for entry in natives:
        if entry.source is not None:
            libraries = needed_libraries(entry.source)
            needed |= {name: where for name, where in libraries.items() if where and where.resolve() not in brought}
    folders = {where.parent for name, where in needed.items() if name.startswith("libc.so")}
    needed |= {name: folder / name for folder in folders for name in _C_LIBRARY_PARTS if (folder / name).exists()}
    for name, where in sorted(needed.items()):
        found_by_loader = str(where).startswith(("/lib", "/usr/lib"))
        yield file_entry(str(where) if found_by_loader else f"{PYTHON}/lib/{name}", where, 0o755)
