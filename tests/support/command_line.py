"""Runs commands of `rollstream` within this process: in one of its own, a command mostly waits for imports.

This is for commands that print an answer and return. Those that run until they are told to stop handle signals, so they
need a process.
"""

import contextlib
import io
import logging
import subprocess
from collections.abc import Sequence
from pathlib import Path

from rollstream.pipeline.command_line.cli import main
from rollstream.pipeline.command_line.commands import GROUPS


def in_full(words: Sequence[str]) -> tuple[str, ...]:
    """A command line with the group of its command: `learn` becomes `role learn`, and `stop` becomes `steer stop`."""
    group = next((group for group, names in GROUPS.items() if words and words[0] in names), None)
    return (
        tuple(words)
        if group is None or words[:2] in (("env", "new"), ("env", "check"), ("env", "serve"))
        else (group, *words)
    )


def answer_of(directory: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Exit code and output of a command in a working directory, as of a process."""
    out, err, root = io.StringIO(), io.StringIO(), logging.getLogger()
    handlers = root.handlers[:]
    try:
        with contextlib.chdir(directory), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(in_full(words))
    except SystemExit as ended:  # the parser of arguments refuses them
        code = int(ended.code or 0)
    finally:
        root.handlers[:] = handlers  # a command's logs go to its own stderr
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())
