"""A process of a run that could not be started is no process, and signals go to no other one in its place."""

import os
from pathlib import Path

import pytest

from rollstream.pipeline.run.supervised_role import RoleSpec, SupervisedRole, Unstarted


def test_a_role_that_could_not_be_started_has_no_group_to_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "killpg", lambda group, number: killed.append((group, number)))
    role = SupervisedRole(
        spec=RoleSpec(name="a-0", arguments=("a",)),
        log=Path("a.log"),
        process=Unstarted(),
        ready_fd=None,
        started=0.0,
        heard=0.0,
    )
    role.kill_group()
    assert killed == []
    assert role.identity is None
