"""Fills the index of a run in a separate process, which reports its progress through a pipe.

Filling an index may occupy a processor for minutes, while the page must answer requests within milliseconds.
"""

import logging
import sqlite3
import time
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import NamedTuple

from rollstream.pipeline.audit.process_pool import start_child
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.index.run_index import IndexProgress, RunIndex
from rollstream.pipeline.index.writer import index_file
from rollstream.topics import logs
from rollstream.topics.errors import RollstreamError

logger = logging.getLogger(__name__)
_POLL_S = 0.25
_EVERY_S = 1.0
"""Least time between two reports."""
_LOOK_S = 2.0
"""Time between checks of whether an archive has grown, or another process has filled the index."""
_AGAIN_S = 5.0
"""Pause after an error of the brokers."""


class Filled(NamedTuple):
    """A report of the process: at its start, after an error, and at most once a second when its index or the end of the
    log has moved on."""

    progress: IndexProgress | None
    """None if the index cannot be opened or filled now."""
    problem: str = ""


def start(config: RunConfig, archive: str) -> tuple[Connection, BaseProcess]:
    """Start the process; it sends `Filled` until it is killed or this process has ended."""
    return start_child(partial(_fill, config, archive))


def _fill(config: RunConfig, archive: str, pipe: Connection) -> None:
    logs.setup(config.log_level)
    while True:
        try:
            with RunIndex.open(config, archive) as index:
                _read(index, pipe)
        except (RollstreamError, sqlite3.Error) as error:
            text = str(error)
            if isinstance(error, sqlite3.Error):
                text = f"the index cannot be written to {index_file(config, archive)} ({error}); free space there"
            logs.event(logger, "run_not_indexed", level=logging.WARNING, run=config.run, error=text)
            pipe.send(Filled(None, text))
            time.sleep(_AGAIN_S)


def _read(index: RunIndex, pipe: Connection) -> None:
    """Index the records that arrive, and report the progress, until an error occurs."""
    moved, reported, looked = True, None, -_EVERY_S
    while True:
        if time.monotonic() >= looked + (_EVERY_S if moved else _LOOK_S):
            looked = time.monotonic()
            progress = index.progress()
            if moved or progress != reported:
                moved, reported = False, progress
                pipe.send(Filled(progress))
        began = time.monotonic()
        if index.poll(_POLL_S):
            moved = True
        elif time.monotonic() - began < _POLL_S / 2:
            time.sleep(_POLL_S)  # Another process fills the index, or the archive has no more records.
