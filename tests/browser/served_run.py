"""A run whose page is served by a process of its own, and what its texts and numbers are."""

import json
import re
import subprocess
import urllib.request
from dataclasses import dataclass
from typing import Any, Self

from tests.support.runs import RealRun
from tests.support.waiting import eventually

GROUPS = 24
HOSTILE = """<img src=x onerror="alert('text')"><script>alert('script')</script>"""


@dataclass
class ServedRun:
    """A run and the process that serves its page."""

    run: RealRun
    process: "subprocess.Popen[bytes]"
    url: str

    @classmethod
    def start(cls, run: RealRun) -> Self:
        """Serve the page of a run; return when it has indexed what is on the log."""
        process = run.start("ui")
        url = url_of(run, process)
        await_index(run, url)
        return cls(run, process, url)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)

    def serve_again(self) -> None:
        """Start the server at the same address."""
        self.process = self.run.start("ui", ui__port=int(self.url.rpartition(":")[2].strip("/")))
        assert url_of(self.run, self.process) == self.url


def url_of(run: RealRun, process: "subprocess.Popen[bytes]") -> str:
    """The address that the server printed."""

    def printed() -> str | None:
        match = re.search(r"^page of runs? .*: (http://\S+)$", run.log_of(process), re.MULTILINE)
        return match and match[1]

    return (eventually(printed, 60, "the address of the page") or "").rstrip("/") + "/"


def await_index(run: RealRun, url: str) -> None:
    """Wait until the page has indexed what is on the log."""

    def indexed() -> bool:
        with urllib.request.urlopen(f"{url}api/runs/{run.name}/overview", timeout=60) as answer:
            at = json.loads(answer.read())["indexed"]
        with urllib.request.urlopen(f"{url}api/runs/{run.name}/facets", timeout=60) as answer:
            return bool(at["offset_done"] == at["offset_total"] > 0 and json.loads(answer.read())["fates"])

    eventually(indexed, 60, "the index of the run")


def command(served: ServedRun, *words: str) -> dict[str, Any]:
    """JSON that a command prints."""
    done = subprocess.run(
        served.run.command(*words, "--json"), capture_output=True, text=True, check=False, timeout=300
    )
    return dict(json.loads(done.stdout))
