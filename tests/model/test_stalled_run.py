"""A run on a real broker that makes no step for long: `rollstream top` names the stage that keeps it from one."""

import json
import time
from typing import Any

from rollstream.topics.records import LearnerStep, Metrics
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from tests.support.command_line import answer_of
from tests.support.runs import RealRun, rollout
from tests.support.waiting import eventually

SOON = "--set=supervisor.step_patience_s=1"


def shown(run: RealRun, *flags: str) -> dict[str, Any]:
    answer = answer_of(run.directory, "top", "--json", *run.command(*flags)[4:])
    assert answer.returncode == 0, answer.stderr
    return dict(json.loads(answer.stdout))


def says(run: RealRun, role: str, **values: float) -> None:
    """A component's newest metrics, as it writes them."""
    record = Metrics(component=f"{role}-0", timestamp=time.time(), labels={"role": role}, values=values)
    run.send_bytes("metrics", encode(record), role.encode())


def stage(run: RealRun) -> str:
    says(run, "env", waiting_for_capacity=0.0)
    says(run, "infer", policy_version=0.0)
    return str(shown(run, SOON)["stalled_stage"])


def test_the_stage_is_that_which_has_input_and_gives_nothing_on(real_run: RealRun) -> None:
    run = real_run.prepare()
    step = LearnerStep(
        learner="main",
        step=1,
        input_run=run.name,
        uses=(),
        position=0,
        policy_version=-1,
        params_digest="d",
        trained_total=0,
        skipped_total=0,
        timestamp=time.time(),
    )
    run.send_bytes("steps", encode(step), encode_key("main", 1))
    eventually(lambda: stage(run) == "env", 60, "workers that play, and no rollout")
    run.send(rollout(f"x{example}", member) for example in range(8) for member in range(4))
    eventually(lambda: stage(run) == "group", 60, "rollouts that grouping does not read")
    grouping = run.start("group")
    eventually(lambda: stage(run) == "learn", 120, "batches that the learner does not take")
    grouping.terminate()
    assert grouping.wait(120) == 0
    text = answer_of(run.directory, "top", "--once", *run.command(SOON)[4:]).stdout
    assert "stalled at learn: the learner does not take batches" in text
    assert shown(run)["stalled_stage"] == "", "ten minutes have not passed"
