"""A worker plays other environments, once operators want it, from the end of the groups that it has begun."""

import argparse
import asyncio
from collections.abc import Callable, Mapping
from types import SimpleNamespace

import pytest

from rollstream.pipeline.config import load
from rollstream.pipeline.roles import env
from rollstream.topics.control.steering import DesiredState
from rollstream.topics.records import DesiredProcesses


def test_a_worker_begins_anew_only_when_its_own_environments_change(monkeypatch: pytest.MonkeyPatch) -> None:
    state, played = DesiredState(), []

    async def play(
        environments: object,
        *_words: object,
        follow: Callable[[Mapping[str, int]], None],
        stop: asyncio.Event,
        **_more: object,
    ) -> None:
        played.append(environments)
        follow(state.numbers | {"env:add": 7})
        assert not stop.is_set(), "it plays that one already"
        if len(played) == 1:
            state.processes["env:dsort3"] = DesiredProcesses(role="env:dsort3", processes=2)
            follow(state.numbers)
            await stop.wait()

    monkeypatch.setattr(env, "run_worker", play)
    monkeypatch.setattr(env, "desired_state", lambda _kafka, _run: state)
    monkeypatch.setattr(env, "wait_for_broker", lambda _kafka: None)
    monkeypatch.setattr(env, "run_until_stopped", lambda work: asyncio.run(work(asyncio.Event())))
    monkeypatch.setattr(
        env,
        "environments_of",
        lambda config, ordinal, numbers: [
            SimpleNamespace(name=e.use, entry=e) for e in env.played_by(config, ordinal, numbers)
        ],
    )
    config = load(flags=["environments=[{use='dsort3', workers=1}, {use='add', workers=2}]", "supervisor.workers=2"])
    assert env.run(config, argparse.Namespace(ordinal=1)) == 0
    assert [[environment.name for environment in each] for each in played] == [["add"], ["dsort3", "add"]]
