"""`rollstream steer scale`: what it records on a real broker, and the processes of a run that follow it."""

import json
import subprocess
from dataclasses import replace
from typing import Any

import pytest

from rollstream.pipeline.control import steering
from rollstream.topics.config import TopicsConfig
from rollstream.topics.control.steering import desired_state
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.records import DesiredProcesses
from tests.support.command_line import answer_of
from tests.support.runs import RealRun

PARTITIONS = 3


@pytest.fixture
def run(real_run: RealRun) -> RealRun:
    real_run.topics = TopicsConfig(partitions=PARTITIONS)
    # This is longer than any wait here, so partitions move because a process left, not because it expired.
    client = {"heartbeat.interval.ms": "500"}
    real_run.kafka = replace(real_run.kafka, session_timeout_s=60.0, client=client)
    return real_run.prepare()


def said(run: RealRun, *words: str) -> "subprocess.CompletedProcess[str]":
    return answer_of(run.directory, "scale", *words, *run.command()[4:])


def shown(run: RealRun) -> Any:
    return json.loads(said(run, "--json").stdout)


def test_numbers_are_recorded_withdrawn_and_refused_with_a_remedy(run: RealRun) -> None:
    assert shown(run) == {}
    assert said(run, "env=8", "group=3", "infer=2").returncode == 0
    assert shown(run) == {"env": 8, "group": 3, "infer": 2}
    assert said(run, "env=auto", "infer=5").returncode == 0
    assert steering.state(run.kafka, run.name)["processes"] == {"group": 3, "infer": 5}
    for words, remedy in {
        ("group=4",): "has 3 partitions, each read by one process; `rollstream fork --partitions` starts a run",
        ("env=0",): "at least one process is needed",
        ("learn=2",): "set learner.processes and start `rollstream run` again",
        ("label=2",): "set labeling.processes",
        ("workers=2",): "roles that can be scaled: env, group, infer, gateway, eval",
        ("env",): "write ROLE=N",
        ("env=many",): "write env=2, or env=auto",
        ("env=9999",): "at most 512",
        ("env=3", "group=9"): "3 partitions",
    }.items():
        refused = said(run, *words)
        assert (refused.returncode, remedy in refused.stderr) == (2, True), refused.stderr
    assert shown(run) == {"group": 3, "infer": 5}, "a refused command records nothing"
    with pytest.raises(ConfigurationError, match="there is no command 'fly'; commands are scale"):
        steering.record(run.kafka, run.name, {"command": "fly"})
    with pytest.raises(ConfigurationError, match="needs 'processes'"):
        steering.record(run.kafka, run.name, {"command": "scale"})


def requests(run: RealRun) -> dict[str, DesiredProcesses]:
    return desired_state(run.kafka, run.name).processes


def test_a_number_that_a_run_refuses_gives_way_to_the_number_that_it_keeps(run: RealRun) -> None:
    assert said(run, "env=512", "infer=2").returncode == 0
    refused = requests(run)
    assert said(run, "infer=2").returncode == 0
    steering.put_back(run.kafka, run.name, refused["infer"], None)
    assert shown(run) == {"env": 512, "infer": 2}, "there is another request by now, for the same number"
    steering.put_back(run.kafka, run.name, requests(run)["infer"], None)
    steering.put_back(run.kafka, run.name, refused["env"], 4)
    assert shown(run) == {"env": 4}
