"""Runs commands of `rollstream` within this process: most of what each takes in a process of its own is importing.

For commands that ask, print and return. Those that run until they are told to stop handle signals, and are processes.
"""

import contextlib
import io
import logging
import subprocess
from pathlib import Path

from rollstream.pipeline.cli import main


def answer_of(directory: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Exit code and output of a command in a working directory, as of a process."""
    out, err, root = io.StringIO(), io.StringIO(), logging.getLogger()
    handlers = root.handlers[:]
    try:
        with contextlib.chdir(directory), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(words)
    except SystemExit as ended:  # the parser of arguments refuses them
        code = int(ended.code or 0)
    finally:
        root.handlers[:] = handlers  # a command's logs go to its own stderr
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())
