"""Lasting changes from the page of a real run: a rollback of its weights and an exclusion, as the command line makes
them."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from rollstream.consumers.trainers.step_writer import StepWriter
from rollstream.consumers.weights.rollback import note_of
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.records import ExcludedBatch
from tests.support.page import PageClient
from tests.support.runs import RealRun, rollout
from tests.support.serving_engines import ARRAYS, MODEL_JSON, published_exactly
from tests.support.settled import settled
from tests.support.waiting import eventually


@pytest.fixture
def run(real_run: RealRun) -> Iterator[RealRun]:
    return real_run.prepare()


def page_of(run: RealRun) -> PageClient:
    process = run.start("ui")

    def printed() -> str | None:
        match = re.search(r"^page of runs? .*: (http://\S+)$", run.log_of(process), re.MULTILINE)
        return match and match[1]

    return PageClient(eventually(printed, 60, "the address of the page") or "")


def test_a_rollback_and_an_exclusion_are_made_once_they_can_be_and_listed(run: RealRun) -> None:
    run.start("group")
    run.send(rollout(f"x{example}", member) for example in range(8) for member in range(4))
    with StepWriter(run.kafka, run.name, learner="test", model=MODEL_JSON) as trainer:
        trainer.publish_version(published_exactly(ARRAYS))
        page = page_of(run)
        path = f"/api/runs/{run.name}/commands"

        def give(**command: object) -> tuple[int, Any]:
            answer = page.ask("POST", path, {"X-Rollstream": "1"}, json.dumps(command).encode())
            return answer.status, answer.json

        back = {"command": "rollback", "version": 1, "reason": "reward hacking"}
        status, refused = give(**back)
        assert (status, "publishes into run" in refused["error"]) == (409, True)
        assert give(**(back | {"reason": " "}))[0] == 400
        assert give(**(back | {"version": 77}))[0] == 400
        message = "Policy version 2 has the parameters of version 1."
        assert give(**back, take_over=True) == (200, {"recorded": True, "said": message})
    notes = list(filter(None, map(note_of, read_to_end(run.kafka, run.topic("policies")))))
    assert [(note.source, note.reason) for note in notes] == [(1, "reward hacking")]

    settled(run, batched=32)
    assert give(command="exclude")[0] == 400
    assert give(command="exclude", environments="env")[0] == 400
    assert give(command="exclude", environments=["envv"])[0] == 400
    status, done = give(command="exclude", workers=["w0"])
    assert (status, done["said"][:25]) == (200, "32 rollouts are excluded,")
    named = {record.batch_id for record in run.read("control") if isinstance(record, ExcludedBatch)}
    assert len(named) == len(run.read("batches"))

    state = page.json(path)["state"]
    assert list(state["rolled_back"]) == ["version 2"]
    assert state["rolled_back"]["version 2"].endswith(": reward hacking")
    assert state["excluded"]["workers"] == "w0"
    assert set(state["excluded"]["batches"].split(", ")) == named
