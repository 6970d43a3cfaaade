"""Reports the progress of reads at the start of a role, so that its supervisor goes on waiting while records arrive."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
_EVERY_S = 5.0


def reported(
    records: Iterable[T],
    topic: str,
    report: Callable[[str], object],
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[T]:
    """Yield the records of a topic, and report every few seconds how many there were."""
    due_s = clock() + _EVERY_S
    for number, record in enumerate(records, start=1):
        if clock() >= due_s:
            report(f"reading {topic}: {number} records so far")
            due_s = clock() + _EVERY_S
        yield record


async def report_growth(
    records_read: Callable[[], int], topic: str, report: Callable[[str], object], *, every_s: float = _EVERY_S
) -> None:
    """Report every `every_s` seconds how many records of a topic were read, if there were new ones; until cancelled."""
    before = records_read()
    while True:
        await asyncio.sleep(every_s)
        now = records_read()
        if now > before:
            report(f"reading {topic}: {now - before} more records")
            before = now
