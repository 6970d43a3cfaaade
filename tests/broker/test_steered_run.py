"""Commands to a real `rollstream run` with default settings, and what they leave on its topics."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollstream.consumers.grouping.config import GrouperConfig
from rollstream.consumers.grouping.process.bootstrap import committed_offsets
from rollstream.pipeline.audit.ledger import ledger
from rollstream.pipeline.audit.verification import verify
from rollstream.topics import codec
from rollstream.topics.catalogue import topic_name
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.reader import read_to_end
from tests.support.command_line import answer_of
from tests.support.waiting import eventually

VALUES = {
    "supervisor.workers": 1,
    "grouper.processes": 1,
    "learner.model.num_hidden_layers": 1,
    "worker.group_size": 4,
    "worker.metrics_interval_s": 1,
    "grouping.batch_rollouts": 8,
    "learner.rollouts_per_step": 32,
    "learner.microbatch_rows": 4,
    "learner.max_steps": 100000,
}


class Run:
    """A `rollstream run` of the demo's task, started as a user starts it, and the commands to it."""

    def __init__(self, broker: str, name: str, directory: Path) -> None:
        self.kafka, self.name, self.directory = KafkaConfig(bootstrap_servers=broker), name, directory
        self._where = ["--run", name, "-b", broker]
        self._log = directory / "run.out"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, **values: object) -> None:
        """Start it, and wait until every process is ready."""
        settings = VALUES | {"data_dir": self.directory} | {k.replace("__", "."): v for k, v in values.items()}
        flags = [f"--set={name}={value}" for name, value in settings.items()]
        command = [sys.executable, "-P", "-m", "rollstream", "run", "examples/demo.toml", *self._where, *flags]
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        self.await_output("processes are ready")

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        assert self._process is not None
        return self._process

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def await_output(self, text: str) -> None:
        eventually(lambda: text in self.output or self.process.poll() is not None, 300, text)
        assert text in self.output, self.output

    def say(self, *words: str) -> str:
        """Run a command about the run, and return what it prints."""
        answer = answer_of(self.directory, *words, *self._where)
        assert answer.returncode == 0, answer.stderr
        return answer.stdout

    def top(self) -> dict[str, Any]:
        shown: dict[str, Any] = json.loads(self.say("top", "--json"))
        return shown

    def processes(self, role: str) -> int:
        """Processes of a role that run now, as the system has them."""
        children = psutil.Process(self.process.pid).children()
        return sum(" -m rollstream " + role + " " in " ".join(child.cmdline()) + " " for child in children)

    def await_processes(self, **numbers: int) -> None:
        def there() -> bool:
            assert self.process.poll() is None, self.output
            return all(self.processes(role) == number for role, number in numbers.items())

        eventually(there, 300, f"{numbers}")

    def await_steps(self, more: int) -> None:
        """Wait until so many further steps are on record."""
        before = self.top()["step"]
        eventually(lambda: self.top()["step"] >= before + more or self.process.poll() is not None, 300, "further steps")
        assert self.process.poll() is None, self.output

    def kill(self) -> None:
        """kill -9 of the overseer; its processes end by themselves."""
        children = psutil.Process(self.process.pid).children()
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        psutil.wait_procs(children, timeout=120)
        assert not [child for child in children if child.is_running()]

    def stop(self) -> None:
        """Stop it as an operator does."""
        self.process.terminate()
        assert self.process.wait(300) == 0, self.output

    def check(self) -> None:
        """Assert that every rollout is in one place, and that a second fold of the log gives the same batches."""
        assert ledger(self.kafka, self.name).problems == []
        assert verify(self.kafka, self.name).mismatches == []

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        print(self.output[-4000:] if self._log.exists() else "")


@pytest.fixture
def steered(broker: str, run_name: str, tmp_path: Path) -> Iterator[Run]:
    run = Run(broker, run_name, tmp_path)
    try:
        yield run
    finally:
        run.close()


def killed_at(run: Run, command: Callable[[], object]) -> None:
    """Give a command, kill the overseer at that moment, and start it again."""
    command()
    run.kill()
    run.start()


@pytest.mark.long
def test_a_run_follows_numbers_of_processes_also_after_its_end_and_nothing_is_lost(steered: Run) -> None:
    run = steered
    run.start()
    run.await_processes(env=1, group=1, infer=1)
    run.say("scale", "env=3", "group=3", "infer=2")
    run.await_processes(env=3, group=3, infer=2)
    run.await_steps(2)
    killed_at(run, lambda: run.say("scale", "env=2", "group=2", "infer=1"))
    run.await_processes(env=2, group=2, infer=1)
    run.await_steps(2)
    run.say("scale", "env=auto", "group=auto", "infer=auto")
    run.await_processes(env=1, group=1, infer=1)
    run.stop()
    run.check()
    assert "role_killed" not in run.output


@pytest.mark.long
def test_a_run_ends_after_the_step_that_is_asked_for_and_one_that_begins_later_knows_it(steered: Run) -> None:
    run = steered
    run.start()
    run.await_steps(1)
    last = run.top()["step"] + 4
    assert f"after step {last}" in run.say("stop", "--at-step", str(last))
    assert run.process.wait(600) == 0, run.output
    assert f"as `rollstream stop --at-step {last}` asked" in run.output
    assert run.top()["step"] == last
    run.start()
    assert run.process.wait(600) == 0, run.output
    assert run.top()["step"] == last
    assert run.say("stop", "--withdraw").endswith("train to the end of their settings\n")
    run.start(learner__max_steps=last + 1)
    assert run.process.wait(600) == 0, run.output
    assert run.top()["step"] == last + 1
    run.check()


def unread_rollouts(run: Run) -> int:
    """Rollouts that grouping has not read; marks of its own may come after its end."""
    topic = topic_name(run.name, "rollouts")
    group = GrouperConfig().group_id(run.name)
    partitions = topic_admin.partitions_of(run.kafka, topic)
    start = {place.partition: place.offset for place in committed_offsets(run.kafka, group, topic, partitions)}
    return sum(codec.kind_of(message.value) == "Rollout" for message in read_to_end(run.kafka, topic, start=start))


@pytest.mark.long
def test_a_drained_run_ends_with_nothing_in_flight_also_over_kills_and_goes_on_when_that_is_withdrawn(
    steered: Run,
) -> None:
    run = steered
    run.start()
    run.await_steps(1)
    killed_at(run, lambda: run.say("stop", "--drain"))
    assert run.process.wait(600) == 0, run.output
    assert "as `rollstream stop --drain` asked; nothing is in flight" in run.output
    assert "role_killed" not in run.output
    books = ledger(run.kafka, run.name)
    assert (books.problems, books.in_flight) == ([], 0)
    assert (run.top()["waiting"], unread_rollouts(run)) == (0, 0)
    last = run.top()["step"]
    run.start()
    assert run.process.wait(600) == 0, "what was drained begins nothing: " + run.output
    assert run.top()["step"] == last
    run.say("stop", "--withdraw")
    run.start()
    run.await_steps(2)
    run.stop()
    run.check()
