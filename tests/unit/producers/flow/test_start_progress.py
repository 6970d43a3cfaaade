"""The start of a role that reads much reports its progress, and is silent while nothing arrives."""

import asyncio
from collections.abc import Iterator

from rollstream.producers.flow.start_progress import report_growth, reported


def test_a_long_read_is_reported_every_few_seconds_and_loses_no_record() -> None:
    now_s, lines = 0.0, list[str]()

    def slow() -> Iterator[int]:
        nonlocal now_s
        for number in range(12):
            now_s += 1.0
            yield number

    assert list(reported(slow(), "run.evals", lines.append, clock=lambda: now_s)) == list(range(12))
    assert lines == [f"reading run.evals: {count} records so far" for count in (5, 10)]


def test_growth_is_reported_and_a_standstill_is_not() -> None:
    looks = iter([3, 3, 10, 10, 10, 12])
    lines = list[str]()

    async def watch() -> None:
        end = asyncio.get_running_loop().create_future()

        def count() -> int:
            number = next(looks, None)
            if number is None:
                end.set_result(None)
                raise asyncio.CancelledError
            return number

        reporting = asyncio.ensure_future(report_growth(count, "run.calls", lines.append, every_s=0.0))
        await end
        await asyncio.gather(reporting, return_exceptions=True)
        assert reporting.cancelled()

    asyncio.run(watch())
    assert lines == ["reading run.calls: 7 more records", "reading run.calls: 2 more records"]
