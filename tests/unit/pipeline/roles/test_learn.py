"""A start that computes for long is reported; one that only waits is not."""

import threading

from rollstream.pipeline.roles.learn import BusyProgress
from tests.support.waiting import eventually


class Processor:
    """Processor time of a process that computes, or waits, as a test says."""

    def __init__(self) -> None:
        self.computes, self.looks, self._used_s = True, 0, 0.0

    def __call__(self) -> float:
        self.looks += 1
        self._used_s += 1.0 if self.computes else 0.0001
        return self._used_s


def test_the_last_report_is_repeated_while_the_process_computes_and_not_while_it_waits() -> None:
    heard: list[str] = []
    processor = Processor()
    with BusyProgress(heard.append, every_s=0.01, processor_s=processor) as progress:
        eventually(lambda: len(heard) > 2, 60, "reports before the first progress")
        assert heard[0] == "starting, 1 s of processor time so far"
        progress("compiling")
        assert "compiling" in heard
        eventually(lambda: heard[-1].startswith("compiling, "), 60, "the last report is repeated")
        processor.computes = False
        looks = processor.looks
        eventually(lambda: processor.looks > looks + 1, 60, "the processor time is looked at")
        reports, looks = len(heard), processor.looks
        eventually(lambda: processor.looks > looks + 5, 60, "the processor time is looked at again")
        assert len(heard) == reports
        processor.computes = True
        eventually(lambda: len(heard) > reports, 60, "reports once it computes again")


def test_nothing_is_repeated_after_the_end() -> None:
    heard: list[str] = []
    progress = BusyProgress(heard.append, every_s=0.01, processor_s=Processor())
    eventually(lambda: heard, 60, "a report")
    repeating = [thread for thread in threading.enumerate() if thread.name == "busy progress"]
    assert repeating
    progress.close()
    assert not any(thread.is_alive() for thread in repeating)
    progress.close()
