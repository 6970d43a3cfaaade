"""Compiles modules for an image, because a read-only container cannot write bytecode.

The same sources give the same bytes: the module runs as a program with a fixed hash seed, because bytecode contains
sets of constants in iteration order, which depends on the seed. The program reads a JSON list of [source, path in the
image, bytecode file] from standard input.
"""

import json
import os
import py_compile
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rollstream.infra.image.entries import ImageEntry
from rollstream.topics.errors import ConfigurationError

_SHARE = 500
"""Number of modules that one process compiles; fixed, because bytecode depends on what was compiled before it."""


def compiled(sources: Sequence[ImageEntry], scratch: Path) -> list[ImageEntry]:
    """Return the bytecode of the modules that compile, as entries in `__pycache__`; its files are written to `scratch`.

    Bytecode contains the digest of its source instead of the file's time, and Python does not check the digest.
    """
    suffix = f".{sys.implementation.cache_tag}.pyc"
    modules = sorted((entry for entry in sources if entry.path.endswith(".py") and entry.source), key=lambda e: e.path)
    scratch.mkdir()
    entries = [
        ImageEntry(
            str(Path(module.path).parent / "__pycache__" / (Path(module.path).stem + suffix)),
            source=scratch / f"{number}.pyc",
            mode=0o644,
        )
        for number, module in enumerate(modules)
    ]
    work = [[str(m.source), m.path, str(e.source)] for m, e in zip(modules, entries, strict=True)]
    shares = [work[first : first + _SHARE] for first in range(0, len(work), _SHARE)]
    at_once = os.cpu_count() or 1
    for first in range(0, len(shares), at_once):
        _compile_beside_each_other(shares[first : first + at_once])
    return [entry for entry in entries if entry.source is not None and entry.source.exists()]


def _compile_beside_each_other(shares: Sequence[Sequence[Sequence[str]]]) -> None:
    programs = []
    for share in shares:
        program = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", "-m", "rollstream.infra.image.bytecode"],
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )
        assert program.stdin is not None
        program.stdin.write(json.dumps(share).encode())
        program.stdin.close()
        programs.append(program)
    failures = [code for program in programs if (code := program.wait())]
    if failures:
        raise ConfigurationError(f"modules cannot be compiled here: a compiling process exited with {failures[0]}")


def main() -> None:
    """Compile the modules that standard input names; files that do not compile, such as templates, are left out."""
    for source, path, target in json.load(sys.stdin):
        with suppress(py_compile.PyCompileError):
            py_compile.compile(
                source,
                target,
                path,
                doraise=True,
                invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
            )


if __name__ == "__main__":
    main()
