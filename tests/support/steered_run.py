"""A real `rollstream run`, started, commanded, killed and stopped as an operator does it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from rollstream.pipeline.audit.ledger import Ledger, ledger
from rollstream.pipeline.audit.verification import verify
from rollstream.topics.config import KafkaConfig
from tests.faults.auditor import audit
from tests.support.command_line import answer_of, in_full
from tests.support.paths import PYTHON_PATH, ROOT
from tests.support.waiting import eventually

DEMO = ROOT / "recipes" / "dsort3" / "run.toml"
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


class SteeredRun:
    """A `rollstream run`, of the demo's task unless told otherwise, and the commands to it."""

    def __init__(
        self, broker: str, name: str, directory: Path, recipe: Path = DEMO, values: Mapping[str, object] = VALUES
    ) -> None:
        """`recipe` is the file of its settings, and `values` are further settings."""
        self.kafka, self.name, self.directory = KafkaConfig(bootstrap_servers=broker), name, directory
        self._recipe, self.values = recipe, dict(values)
        self._where = ["--run", name, "-b", broker]
        self._log = directory / "run.out"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, **values: object) -> None:
        """Start it, and wait until every process is ready."""
        settings = self.values | {"data_dir": self.directory} | {k.replace("__", "."): v for k, v in values.items()}
        flags = [f"--set={name}={value}" for name, value in settings.items()]
        command = [sys.executable, "-P", "-m", "rollstream", "run", str(self._recipe), *self._where, *flags]
        # Environments of tests import helpers of the tests.
        environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                command, cwd=self._recipe.parent, env=environment, stdout=output, stderr=subprocess.STDOUT
            )
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

    def pids(self, role: str = "") -> list[int]:
        """Processes of a role, or of all, that run now, as the system reports them, with those that a killed
        overseer left."""
        settings = str(self.directory / "runs" / self.name / "run.toml")
        started = " ".join((" -m rollstream", *(in_full((role,)) if role else ())))
        collected = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
                command = process.cmdline()
                if settings in command and started in " ".join(command):
                    collected.append(process.pid)
        return collected

    def processes(self, role: str) -> int:
        return len(self.pids(role))

    def kill_role(self, role: str) -> int:
        """kill -9 of every process of a role, which the overseer starts again; return how many there were.

        Waits for a process if none runs, as between the end of a fenced learner and its next start.
        """

        def killed() -> int:
            number = 0
            for pid in self.pids(role):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    number += 1
            return number

        return eventually(killed, 300, f"a process of {role}")

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

    def step_ahead(self, seconds: float = 45.0) -> int:
        """A step that the learner makes in about so many seconds at its present pace, and at least 100 steps ahead.

        On a busy machine a command takes ten seconds, and a learner that compiles shows no pace.
        """
        began, before = time.monotonic(), self.top()["step"]
        now = self.top()["step"]
        return int(now + max(100, seconds * (now - before) / (time.monotonic() - began)))

    def kill(self) -> None:
        """kill -9 of the overseer; its processes wait for another one."""
        self.process.kill()
        self.process.wait()

    def kill_all(self) -> None:
        """kill -9 of every process, as when the machine fails."""
        self.kill()
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        eventually(lambda: not self.pids(), 60, "the end of all processes")

    def stop(self) -> None:
        """Stop it as an operator does."""
        self.process.terminate()
        assert self.process.wait(300) == 0, self.output

    def books(self) -> Ledger:
        return ledger(self.kafka, self.name)

    def check(self) -> None:
        """Assert that every rollout is in one place, that a second fold of the log gives the same batches, and that the
        independent auditor finds nothing."""
        assert self.books().problems == []
        assert verify(self.kafka, self.name).mismatches == []
        assert audit(self.kafka.bootstrap_servers, self.name).findings == []

    def close(self) -> None:
        if self._process is not None and self.pids():
            self.kill_all()
        print(self.output[-4000:] if self._log.exists() else "")
