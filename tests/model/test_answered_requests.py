"""Whoever gives a command that the run refuses is told so, with the reason, and the command fails."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from rollstream.pipeline.config import RunConfig, load
from rollstream.pipeline.control import steering
from rollstream.pipeline.run.plan import ServicePorts
from rollstream.pipeline.run.run_lease import RunLease
from rollstream.pipeline.run.steered_processes import SteeredProcesses
from rollstream.topics.control.steering import SteeringFollower
from tests.support.command_line import answer_of
from tests.support.runs import RealRun
from tests.unit.pipeline.run.test_steered_processes import Roles


@pytest.fixture
def run(real_run: RealRun) -> RealRun:
    return real_run.prepare()


def configuration(run: RealRun) -> RunConfig:
    brokers = f"kafka.bootstrap_servers={run.kafka.bootstrap_servers}"
    return load(flags=[f"run={run.name}", brokers, f"data_dir={run.directory}", "topics.partitions=2"])


@contextmanager
def overseen(run: RealRun) -> Iterator[None]:
    """A process that follows commands as `rollstream run` does."""
    config, ended = configuration(run), threading.Event()
    with ExitStack() as stack:
        following = stack.enter_context(SteeringFollower(run.kafka, run.name))
        stack.enter_context(RunLease(run.kafka, run.name, following, directory=Path("/data"), adoption_s=1.0))
        steered = SteeredProcesses(
            config,
            config,
            run.directory / "run.toml",
            Roles(),
            ServicePorts(config),
            scaler=None,
            say=lambda _line: None,
            put_back=partial(steering.put_back, run.kafka, run.name),
            answer=partial(steering.answer, run.kafka, run.name),
        )

        def follow() -> None:
            while not ended.wait(0.25):
                steered.poll(following.state)

        thread = threading.Thread(target=follow)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def scaled(run: RealRun, *numbers: str) -> tuple[int, str]:
    answer = answer_of(run.directory, "steer", "scale", *numbers, "--run", run.name, "-b", run.kafka.bootstrap_servers)
    return answer.returncode, answer.stderr


def test_a_number_that_the_run_refuses_fails_the_command_and_others_succeed(run: RealRun) -> None:
    code, text = scaled(run, "env=512")
    assert (code, text) == (0, ""), "nobody supervises the run, so nobody answers"
    with overseen(run):
        began = time.monotonic()
        code, text = scaled(run, "env=512")
        assert code == 1
        assert f"run {run.name} refuses this: env=512 is not followed: max_policy_lag" in text
        assert scaled(run, "env=3") == (0, "")
        assert scaled(run, "env=auto") == (0, "")
        code, text = scaled(run, "gateway=2")
        assert (code, "this run has no role gateway" in text) == (1, True)
        assert time.monotonic() - began < 10, "it answers at once"
        with pytest.raises(steering.Refused, match="it has no evaluator; set evaluation"):
            steering.record(run.kafka, run.name, {"command": "evaluate"})
