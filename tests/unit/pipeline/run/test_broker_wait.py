"""A role that starts during an outage waits for a broker, and can be stopped meanwhile."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollstream.pipeline.config import RunConfig, SupervisorConfig
from rollstream.pipeline.process.role_process import READY_VARIABLE, RolePhase
from rollstream.pipeline.run import broker_wait
from rollstream.pipeline.run.supervised_role import RoleSpec
from rollstream.pipeline.run.supervisor import Supervisor
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import BrokerUnavailable
from tests.support.waiting import Patience, eventually

WAITS = "no broker answers yet: "


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address at which connections are refused."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # Bound, and not listened on.
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def poll_until(supervisor: Supervisor, check: Callable[[], bool], what: str) -> None:
    patience = Patience(60)
    while not check():
        assert not patience.ended(what), what
        supervisor.poll(0.1)  # raises RoleFailed at the first exit


def test_a_supervisor_is_told_that_the_brokers_are_lost_again_before_a_role_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    phase, answers = RolePhase(), iter((True, True, False, False))
    read, write = os.pipe()

    def check(_kafka: KafkaConfig) -> None:
        answered = next(answers, None)
        if answered is None:
            phase.ready()
        if answered is False:
            raise BrokerUnavailable("nobody is there")

    monkeypatch.setenv(READY_VARIABLE, str(write))
    monkeypatch.setattr(broker_wait, "PHASE", phase)
    monkeypatch.setattr(broker_wait, "LOOK_S", 0.001)
    monkeypatch.setattr(broker_wait.clients, "check_broker", check)
    broker_wait.wait_for_broker(RunConfig())
    eventually(
        lambda: phase.name == "ready" and not [t for t in threading.enumerate() if t.name == "outages"], 60, "end"
    )
    os.close(write)
    assert os.read(read, 1000) == 2 * f"{WAITS}nobody is there\n".encode()
    os.close(read)


@pytest.mark.parametrize(("outages", "timeout_s"), [(3, 600.0), (1, 0.0)])
def test_a_role_without_a_supervisor_waits_for_a_broker_for_a_time_that_it_logs(
    outages: int, timeout_s: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left = iter([BrokerUnavailable("nobody is there")] * outages)

    def check(_kafka: KafkaConfig) -> None:
        for error in left:
            raise error

    monkeypatch.delenv(READY_VARIABLE, raising=False)
    monkeypatch.setattr(broker_wait, "PHASE", RolePhase())
    monkeypatch.setattr(broker_wait.clients, "check_broker", check)
    config = RunConfig(supervisor=SupervisorConfig(ready_timeout_s=timeout_s))
    if not timeout_s:
        with pytest.raises(BrokerUnavailable, match="nobody is there"):
            broker_wait.wait_for_broker(config)
    else:
        broker_wait.wait_for_broker(config)
    assert next(left, None) is None
    logged = [(record.getMessage(), vars(record)["rollstream_fields"]) for record in caplog.records]
    expected = [("waits_for_broker", {"timeout_s": 600.0, "problem": "nobody is there"})] if timeout_s else []
    assert logged == expected


@pytest.mark.long
def test_roles_wait_for_a_broker_instead_of_using_up_their_restarts(
    nobody: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "rollstream")
    engine = tmp_path / "python"
    engine.write_text("#!/bin/sh\nexit 0\n")  # Says that vLLM is installed.
    engine.chmod(0o755)
    words = {
        "group-0": ["group"],
        "learn-1": ["learn", "--process=1", "--set=learner.processes=2", "--set=learner.coordinator=127.0.0.1:1"],
        "fill": ["fill", "--set=fill.directory=windows"],
        "engine": ["engine", f"--set=serving.python={engine}", '--set=serving.urls=["http://127.0.0.1:1"]'],
    }
    where = ("-b", nobody, f"--set=data_dir={tmp_path}")
    heard: dict[str, list[str]] = {name: [] for name in words}
    with Supervisor(
        tmp_path / "logs",
        environment=os.environ,
        on_progress=lambda name, progress: heard[name].append(progress),
    ) as supervisor:
        for name, role in words.items():
            supervisor.start(
                RoleSpec(name=name, arguments=("-P", "-m", "rollstream", "role", *role, *where), restarts=0)
            )
        before = supervisor.pids
        poll_until(supervisor, lambda: all(heard.values()), "every role to wait")
        assert all(line.startswith(WAITS) and nobody in line for lines in heard.values() for line in lines)
        assert supervisor.pids == before
        # A role that drains when it is stopped has nothing to drain yet: it ends by itself.
        supervisor.stop(["group-0"])
        assert "role_killed" not in caplog.text
