"""A run of a control task waits for labels and buffers, through outages of the brokers, too."""

from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace

import pytest

from rollstream.pipeline.config import RunConfig, load
from rollstream.pipeline.run import control_run
from rollstream.topics.errors import AccessDenied, BrokerUnavailable


@dataclass
class Finished:
    """A supervisor whose collectors have finished."""

    polls: int = 0

    def finished(self, _name: str) -> bool:
        return True

    def poll(self, _wait_s: float) -> None:
        self.polls += 1


ROLES = SimpleNamespace(of=lambda _role: [SimpleNamespace(name="collect-0")])


def watch(supervisor: Finished) -> None:
    control_run.watch(load(), supervisor, ROLES, lambda: None)  # type: ignore[arg-type]


def test_the_run_goes_on_while_no_broker_tells_how_far_labeling_is(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[BrokerUnavailable | bool] = [BrokerUnavailable("no broker answers"), True, False]

    def is_behind(_config: RunConfig) -> bool:
        answer = answers.pop(0)
        if isinstance(answer, BrokerUnavailable):
            raise answer
        return answer

    monkeypatch.setattr(control_run, "is_labeling_behind", is_behind)
    monkeypatch.setattr(control_run.time, "monotonic", count(0.0, 0.25).__next__)
    supervisor = Finished()
    watch(supervisor)
    assert answers == []
    assert supervisor.polls > 0


def test_denied_access_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(_config: RunConfig) -> bool:
        raise AccessDenied("no right")

    monkeypatch.setattr(control_run, "is_labeling_behind", denied)
    with pytest.raises(AccessDenied, match="no right"):
        watch(Finished())
