"""`rollstream steer environment`: running workers follow it, even one that is killed at the moment of the command."""

import json
import subprocess
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from rollstream.topics.records import GroupCancelled, Rollout
from tests.broker.test_curriculum import SORTS
from tests.support.command_line import answer_of
from tests.support.producing import SortingGenerator, serving
from tests.support.runs import RealRun
from tests.support.waiting import eventually

SETTINGS = """
[[environments]]
name = "two"
use = "sorts.py:Sorts"
options = { name = "two", lowest = 50 }

[[environments]]
name = "three"
use = "sorts.py:Sorts"
options = { name = "three", lowest = 500 }

[curriculum]
state_interval_s = 0.2

[worker]
group_size = 2
concurrency = 2
metrics_interval_s = 0.5

[supervisor]
workers = 1

[learner]
rollouts_per_step = 100000
"""


def said(run: RealRun, *words: str) -> "subprocess.CompletedProcess[str]":
    return answer_of(run.directory, *words, *run.command()[4:])


def done(run: RealRun, *words: str) -> str:
    answer = said(run, *words)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def held(run: RealRun) -> Any:
    shown = json.loads(done(run, "environment", "show", "--json"))
    assert shown.pop("environments").keys() == {"two", "three"}
    return shown


def members(run: RealRun) -> dict[str, Counter[str]]:
    """The number of members that each group has on the log, by environment."""
    collected: dict[str, Counter[str]] = {"two": Counter(), "three": Counter()}
    for record in run.read("rollouts"):
        if isinstance(record, Rollout):
            collected[record.environment][record.group_id] += 1
    return collected


def await_more(run: RealRun, environment: str, groups: int = 6) -> None:
    before = len(members(run)[environment])

    def there() -> bool:
        return len(members(run)[environment]) >= before + groups or run.processes[-1].poll() is not None

    eventually(there, 120, f"groups of {environment}", every_s=0.2)
    assert run.processes[-1].poll() is None, run.log_of(run.processes[-1])[-3000:]


def await_log(run: RealRun, process: "subprocess.Popen[bytes]", holds: Callable[[str], bool], what: str) -> None:
    def there() -> bool:
        assert process.poll() is None, run.log_of(process)[-3000:]
        return holds(run.log_of(process))

    eventually(there, 120, what)


@pytest.mark.long
def test_workers_begin_no_group_of_what_is_paused_and_weigh_the_others_as_wanted(real_run: RealRun) -> None:
    run = real_run.prepare()
    (run.directory / "sorts.py").write_text(SORTS.replace("sleep(0.05)", "sleep(0.3)"))  # so that topics stay small
    (run.directory / "run.toml").write_text(SETTINGS)
    run.start("group")  # a worker begins no more groups while nobody reads them
    with serving(SortingGenerator()) as server:

        def start() -> "subprocess.Popen[bytes]":
            config = str(run.directory / "run.toml")
            return run.start("env", "--config", config, worker__inference_urls=f'["{server.base_url}"]')

        worker = start()
        await_more(run, "three")
        await_more(run, "two")
        wrong = ("environment", "weigh", "thre=2")
        eventually(lambda: "did you mean three?" in said(run, *wrong).stderr, 60, "a worker's state", every_s=0.5)
        assert "give a reason" in said(run, "environment", "pause", "three").stderr
        assert "not paused; paused environments: none" in said(run, "environment", "resume", "three").stderr
        assert "must be above 0" in said(run, "environment", "weigh", "two=0").stderr
        assert "write NAME=WEIGHT" in said(run, "environment", "weigh", "two").stderr

        done(run, "environment", "pause", "three", "--reason", "its verifier hangs")
        await_log(run, worker, lambda log: '"paused": ["three"]' in log, "the worker pauses it")
        await_more(run, "two")  # by now the groups that had begun are finished
        paused_at = members(run)["three"]
        assert set(paused_at.values()) == {2}, "groups begun are whole"
        await_more(run, "two")
        assert members(run)["three"] == paused_at
        top = json.loads(done(run, "top", "--json"))
        assert top["paused_environments"] == ["three"]
        assert "paused: three" in done(run, "top", "--once")

        # A worker that is killed and started again keeps to the pause.
        worker.kill()
        worker.wait()
        worker = start()
        await_more(run, "two")
        assert members(run)["three"] == paused_at

        done(run, "environment", "weigh", "three=3")
        done(run, "environment", "resume", "three")
        assert held(run) == {"paused": {}, "weights": {"three": 3.0}}
        await_more(run, "three", 1)
        before = {name: len(groups) for name, groups in members(run).items()}
        await_more(run, "three", 24)
        more = {name: len(groups) - before[name] for name, groups in members(run).items()}
        assert 2.0 < more["three"] / more["two"] < 4.5, more
        done(run, "environment", "weigh", "three=auto")
        assert held(run) == {"paused": {}, "weights": {}}
        assert worker.poll() is None
    assert not [record for record in run.read("rollouts") if isinstance(record, GroupCancelled)]
