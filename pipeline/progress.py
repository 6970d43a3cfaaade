"""A progress bar on standard error for work that takes long, where a person is watching; nothing elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[int, int], None]
"""Called with how much is done, and of how much."""


@contextmanager
def progress(what: str) -> Iterator[Progress]:
    """A function to be told how much is done, of how much."""
    if not sys.stderr.isatty():
        yield lambda _done, _all: None
        return
    # Imported late: a command whose output goes to a program needs none of it.
    from rich import progress as rich
    from rich.console import Console

    columns = (rich.TextColumn(what), rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeRemainingColumn())
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)
