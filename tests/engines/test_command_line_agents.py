"""Claude Code, Codex, and agents of Node with the official clients play at a gateway that is killed in mid-answer."""

from pathlib import Path

import pytest

from rollstream.pipeline.audit.ledger import ledger
from rollstream.topics.config import KafkaConfig, TopicsConfig
from rollstream.topics.kafka.provisioning import apply
from rollstream.topics.records import ModelCall
from tests.support.agents import (
    ANSWER,
    AgentPolicy,
    need_npm,
    start_agent,
    start_session,
    supervised_gateway,
)
from tests.support.gateways import calls_of, post, records
from tests.support.producing import serving
from tests.support.recorded_engine import assert_is_the_engines_own
from tests.support.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
SHELLS = {"claude": ("Bash", "command"), "codex": ("exec_command", "cmd")}
"""Name and argument of the shell of each agent that has one."""


@pytest.mark.parametrize(
    ("agent", "form"),
    [(agent, "streamed") for agent in SHELLS]
    + [(dialect, form) for dialect in ("chat", "responses", "messages") for form in ("whole", "streamed")],
)
def test_an_agent_finishes_its_session_when_the_gateway_is_killed_in_the_middle_of_an_answer(
    broker: str, run_name: str, tmp_path: Path, agent: str, form: str
) -> None:
    need_npm()
    kafka = KafkaConfig(bootstrap_servers=broker)
    apply(kafka, TopicsConfig(partitions=2), run_name)
    if agent in SHELLS:
        tool, argument = SHELLS[agent]
        engine = AgentPolicy(tool, **{argument: "echo $((20+22))"})
    else:
        engine = AgentPolicy("add", a=20, b=22)
    with (
        serving(engine, conversation_cache_tokens=0) as server,
        supervised_gateway(kafka, run_name, server.base_url, tmp_path) as gateway,
    ):
        eventually(lambda: server.version == 3, 60, "weights are loaded")
        session = start_session(gateway)
        process = start_agent(agent, form, session, tmp_path)
        try:
            gateway.until(lambda: engine.paused.is_set() or process.poll() is not None, "the answer to the tool")
            assert process.poll() is None, process.communicate()[0]
            assert gateway.supervisor.kill("gateway-0")
            engine.go_on.set()
            gateway.until(lambda: process.poll() is not None, "the end of the agent")
        finally:
            engine.go_on.set()
            process.kill()
            output = process.communicate()[0]
        print(output)
        assert process.returncode == 0
        assert ANSWER in output
        named = {"session_id": session["session_id"]}
        post(f"{gateway.url}/rl/set_reward", {**named, "reward": 1.0})
        assert post(f"{gateway.url}/rl/end_session", named)[1]["state"] == "finished"
    calls = [record for record in calls_of(kafka, run_name, session["session_id"]) if isinstance(record, ModelCall)]
    assert [(call.number, call.parent) for call in calls] == [(0, ""), (1, calls[0].uid)]
    (rollout,) = records(kafka, run_name)
    assert [turn.role for turn in rollout.turns][-3:] == ["assistant", "tool", "assistant"]
    assert "42" in rollout.turns[-2].text
    assert len(engine.sampled) == 3, "the answer that broke was sampled again"
    assert_is_the_engines_own(rollout, engine, turns=2)
    assert ledger(kafka, run_name).balanced
