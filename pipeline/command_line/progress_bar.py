"""A progress bar on standard error for long work, if standard error is a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ProgressCallback = Callable[[int, int], None]
"""Called with the number of items done and the total."""


@contextmanager
def progress(label: str) -> Iterator[ProgressCallback]:
    """Yield a callback that draws the progress bar; it does nothing if standard error is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda _done, _all: None
        return
    # Imported late, because most commands do not need it.
    from rich import progress as rich
    from rich.console import Console

    columns = (rich.TextColumn(label), rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeRemainingColumn())
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
