"""What a run of tests costs in CPU seconds, by layer, beside the budget of each: a report, never a failure.

A test costs the time of its process and of the children that it waited for. With CPU_SECONDS=FILE, the seconds of each
file of tests are written there as JSON.
"""

import json
import os
import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BUDGETS = {"units": 110, "fold and schedules": 45, "JAX": 80, "model tier": 90, "real tier": 420, "collection": 50}
LAYERS = (
    ("unit/consumers/grouping", "fold and schedules"),
    ("unit/consumers/learner", "JAX"),
    ("unit/consumers/models", "JAX"),
    ("unit", "units"),
    ("model", "model tier"),
    ("", "real tier"),
)


def cpu_s() -> float:
    """CPU seconds of this process and of its children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def layer_of(file: str) -> str:
    """Layer of a file of tests, whose path begins below tests/."""
    return next(layer for folder, layer in LAYERS if not folder or file.startswith(f"{folder}/"))


class CpuSeconds:
    """Counts the seconds of each file; of workers, their own, which the controller adds up."""

    def __init__(self, root: Path) -> None:
        self._root, self._seconds = root, Counter[str]()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self) -> None:
        """All seconds so far: the start of the interpreter, the plug-ins, and every import of a test."""
        self._seconds["collection"] = cpu_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        begin = cpu_s()
        try:
            return (yield)
        finally:
            file = item.path.relative_to(self._root) if item.path.is_relative_to(self._root) else item.path
            self._seconds[file.as_posix()] += cpu_s() - begin

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["cpu_seconds"] = dict(self._seconds)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._seconds.update(getattr(node, "workeroutput", {}).get("cpu_seconds", {}))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        layers = Counter[str]()
        for file, seconds in self._seconds.items():
            layers["collection" if file == "collection" else layer_of(file)] += seconds
        terminalreporter.write_sep("=", "CPU seconds by layer")
        for layer, budget in BUDGETS.items():
            if layers[layer]:
                over = f", {layers[layer] - budget:.0f} over" if layers[layer] > budget else ""
                terminalreporter.write_line(f"{layer:18} {layers[layer]:7.1f} of {budget}{over}")
        if "CPU_SECONDS" in os.environ:
            Path(os.environ["CPU_SECONDS"]).write_text(json.dumps(dict(self._seconds.most_common()), indent=1))
