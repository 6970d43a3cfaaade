"""The page of a real run, served as a user serves it: `rollstream ui` as a process, and answers that equal those of the
command line."""

import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from rollstream.topics.config import KafkaConfig
from tests.support.page import PageClient
from tests.support.runs import RealRun, rollout
from tests.support.waiting import eventually

GROUPS = 24
TIMES = ("quiet_s", "policy_age_s", "rollouts_per_s", "read_per_s", "batches_per_s", "policies_per_s", "history")
"""Fields of a snapshot that depend on when it was made."""


@pytest.fixture(scope="module")
def run(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRun]:
    """A run with batches, drops and a dead letter, and its grouping process."""
    run = RealRun(KafkaConfig(bootstrap_servers=broker), "paged", tmp_path_factory.mktemp("paged")).prepare()
    try:
        run.start("group")
        run.send(rollout(f"x{n}", member, reward=float(member == n % 4)) for n in range(GROUPS) for member in range(4))
        run.send_bytes("rollouts", b"nothing known", b"key", 0)
        eventually(lambda: len(run.read("batches")) >= 4, 60, "batches")
        yield run
    finally:
        run.stop()


def url_of(run: RealRun, process: subprocess.Popen[bytes]) -> str:
    def printed() -> str | None:
        match = re.search(r"^page of runs? .*: (http://\S+)$", run.log_of(process), re.MULTILINE)
        return match and match[1]

    return eventually(printed, 60, "the address of the page") or ""


@pytest.fixture(scope="module")
def page(run: RealRun) -> PageClient:
    return PageClient(url_of(run, run.start("ui")))


def command(run: RealRun, *words: str) -> object:
    """JSON that a command prints."""
    done = subprocess.run(run.command(*words, "--json"), capture_output=True, text=True, check=False, timeout=300)
    return json.loads(done.stdout)


def test_the_overview_is_what_top_prints(run: RealRun, page: PageClient) -> None:
    assert page.json("/api/runs")["runs"][0]["run"] == run.name
    eventually(lambda: page.json(f"/api/runs/{run.name}/overview")["top"]["dead_lettered"], 60, "the dead letter")
    expected = command(run, "top")
    overview = page.json(f"/api/runs/{run.name}/overview")
    for snapshot in (expected, overview["top"]):
        for name in TIMES:
            del snapshot[name]
    assert overview["top"] == expected
    assert overview["top"]["rewards"]
    assert overview["indexed"]["offset_done"] == overview["indexed"]["offset_total"] > 0


def test_a_run_that_moves_tells_its_streams(run: RealRun, page: PageClient) -> None:
    with page.events(f"/api/runs/{run.name}/events") as events:
        name, first = next(events)
        assert name == "overview"
        run.send([rollout("more", 0)])
        for name, overview in events:
            if name == "overview" and overview["top"]["produced"] > first["top"]["produced"]:
                break
        assert overview["live"]


def test_the_page_ends_at_once_while_browsers_listen(run: RealRun) -> None:
    process = run.start("ui")
    page = PageClient(url_of(run, process))
    with page.events(f"/api/runs/{run.name}/events") as events:
        assert next(events)[0] == "overview"
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert {name for name, _ in events} <= {"overview", "changed"}, "the stream ends"
        assert process.wait(60) == 0
        assert time.monotonic() - began < 5, "a second, and what else a busy machine does"


def test_a_run_that_is_not_there_is_an_error_that_names_those_that_are(run: RealRun) -> None:
    done = subprocess.run(
        [*run.command("ui"), "--run", "nowhere"], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 2
    assert run.name in done.stderr
