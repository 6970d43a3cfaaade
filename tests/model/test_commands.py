"""Commands and brokers: what they print for programs, and one line where a topic is missing."""

import json
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from rollstream.producers.flow.mixture_states import MixtureStates
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka import clients
from rollstream.topics.records import EnvironmentState
from rollstream.topics.wire.catalogue import CATALOGUE
from tests.support.command_line import answer_of

Rollstream = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def rollstream(broker: str, tmp_path: Path) -> Rollstream:
    """Runs a command with the address of the broker."""
    return lambda *words: answer_of(tmp_path, *words, "-b", broker)


def json_of(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_topics_are_created_once_and_kept_after(rollstream: Rollstream, run_name: str) -> None:
    flags = ("--run", run_name, "--json", "--set", "topics.partitions=2")
    planned = json_of(rollstream("topics", "plan", *flags))
    assert {p["action"] for p in planned} == {"create"}
    applied = json_of(rollstream("topics", "apply", *flags))
    assert [p["topic"] for p in applied] == [f"{run_name}.{spec.name}" for spec in CATALOGUE]
    assert {p["action"] for p in applied} == {"created"}
    again = json_of(rollstream("topics", "apply", *flags))
    assert {p["action"] for p in again} == {"kept"}
    described = {d["topic"]: d for d in json_of(rollstream("topics", "describe", *flags))}
    assert described[f"{run_name}.rollouts"]["partitions"] == 2
    assert described[f"{run_name}.rollouts"]["settings"]["message.timestamp.type"] == "LogAppendTime"


def test_other_partitions_than_the_runs_are_refused_in_one_line(rollstream: Rollstream, run_name: str) -> None:
    flags = ("--run", run_name, "--set", "topics.partitions=2")
    assert rollstream("topics", "apply", *flags).returncode == 0
    done = rollstream("topics", "apply", "--run", run_name, "--set", "topics.partitions=3")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "has 2 partitions, the configuration says 3" in done.stderr


@pytest.mark.parametrize("command", ["ledger", "verify", "top"])
def test_a_missing_topic_is_one_line_with_the_remedy(rollstream: Rollstream, command: str) -> None:
    # A name that resembles that of an existing run would get a question instead.
    done = rollstream(command, "--run", "unlike-any-other")
    [line] = done.stderr.splitlines()
    assert done.returncode == 2
    assert line.startswith("rollstream: topic unlike-any-other.")
    assert "rollstream topics apply" in line


def test_a_run_without_records_balances(rollstream: Rollstream, run_name: str) -> None:
    flags = ("--run", run_name, "--json")
    json_of(rollstream("topics", "apply", *flags))
    book = json_of(rollstream("ledger", *flags))
    assert (book["balanced"], book["produced"], book["in_flight"]) == (True, 0, 0)
    assert json_of(rollstream("verify", *flags))["batches"] == 0


def test_runs_are_listed_and_a_mistyped_one_is_told_from_one_to_be_made(
    broker: str, rollstream: Rollstream, run_name: str, tmp_path: Path
) -> None:
    name = f"{run_name}-listed"
    json_of(rollstream("topics", "apply", "--run", name, "--json", "--set", "topics.partitions=2"))
    [listed] = [run for run in json_of(rollstream("runs", "--json")) if run["run"] == name]
    assert (listed["partitions"], listed["records"], listed["newest_ms"]) == (2, 0, -1)
    producer = clients.producer(KafkaConfig(bootstrap_servers=broker))
    producer.produce(f"{name}.rollouts", b"not a record")
    assert producer.flush(120) == 0
    done = rollstream("runs")
    first, *rows = done.stdout.splitlines()
    assert first.split("  ")[0] == "run"
    listed_runs = [(run, partitions, count, " ".join(time)) for run, partitions, count, *time in map(str.split, rows)]
    [(partitions, count, newest)] = [facts for run, *facts in listed_runs if run == name]
    assert (partitions, count) == ("2", "1")
    assert datetime.fromisoformat(newest) > datetime.fromtimestamp(time.time(), UTC) - timedelta(minutes=5)
    # Tests that share the broker write at the same time.
    dated = [time for *_others, time in listed_runs if time[:2] == "20"]
    assert dated == sorted(dated, reverse=True), "that of the newest record first"
    done = rollstream("runs", name, "--set", f"data_dir={tmp_path}")
    assert done.stdout.startswith(f"the configuration of {name} is not on this machine\n\nrun ")
    assert done.stdout.splitlines()[-1].split() == [name, "0", "0", "0", "0", "-", "-"]
    compared = json_of(rollstream("runs", name, "--json", "--set", f"data_dir={tmp_path}"))
    assert (compared["settings"], compared["runs"][0]["run"]) == (None, name)
    steering = (("stop",), ("scale",), ("environment", "show"), ("environment", "resume", "math"))
    for command in (("ledger",), ("top", "--once"), ("cat", "steps"), *steering):
        done = rollstream(*command, "--run", f"{run_name}-lsited")
        assert done.returncode == 2
        assert done.stderr.startswith("rollstream: topic ")
        assert f"there is no run {run_name}-lsited; did you mean --run {name}?" in done.stderr
        assert "topics apply" not in done.stderr


def test_all_environments_are_shown_with_the_weights_in_force_and_their_pauses(
    broker: str, rollstream: Rollstream, run_name: str, tmp_path: Path
) -> None:
    settings = tmp_path / "run.toml"
    settings.write_text(
        '[[environments]]\nname = "math"\nuse = "dsort3"\nweight = 3\n[[environments]]\nname = "sort"\nuse = "dsort3"\n'
    )
    flags = ("--run", run_name, "--config", str(settings))
    json_of(rollstream("topics", "apply", *flags, "--json"))
    shown = json_of(rollstream("environment", "show", *flags, "--json"))
    both = {"math": {"weight": 3.0, "paused": None}, "sort": {"weight": 1.0, "paused": None}}
    assert shown == {"paused": {}, "weights": {}, "environments": both}
    assert rollstream("environment", "pause", "sort", "--reason", "it hangs", *flags).returncode == 0
    done = rollstream("environment", "weigh", "sort=0.5", *flags)
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["environment", "weight", "paused", "because"],
        ["math", "3"],
        ["sort", "0.5", "it", "hangs"],
    ]
    # A worker has recorded what it plays; this configuration does not name it.
    with closing(MixtureStates(KafkaConfig(bootstrap_servers=broker), run_name, "w0")) as states:
        states.write([EnvironmentState(environment="chess")])
    shown = json_of(rollstream("environment", "show", *flags, "--json"))
    assert shown["environments"] == {
        "chess": {"weight": None, "paused": None},
        "sort": {"weight": 0.5, "paused": "it hangs"},
    }
