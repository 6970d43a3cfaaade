"""Responses and Messages through gateways on a real Kafka: any gateway continues a response of another."""

from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from rollstream.pipeline.audit.ledger import ledger
from rollstream.topics.config import KafkaConfig
from rollstream.topics.records import ModelCall
from tests.support.gateways import calls_of, gateway, records
from tests.support.producing import serving
from tests.support.recorded_engine import RecordedEngine, assert_is_the_engines_own
from tests.support.waiting import eventually

FUNCTION: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
TOOL: Any = {"name": "add", "input_schema": {"type": "object"}}


def test_a_response_is_continued_at_other_gateways(kafka: KafkaConfig, run_name: str, tmp_path: Path) -> None:
    """Each turn goes to the gateway that did not record the last one, and the first answers when it was killed."""
    engine = RecordedEngine()
    with (
        serving(engine, conversation_cache_tokens=0) as server,
        gateway(kafka, run_name, server.base_url, tmp_path) as first,
        gateway(kafka, run_name, server.base_url, tmp_path, "--ordinal", "1") as second,
    ):
        eventually(lambda: server.version == 3, 60, "weights are loaded")
        session = first.start_session(task_id="sum", environment="sums")
        items: Any = "20+22?"
        previous: Any = openai.omit
        uids = []
        for turn, at in enumerate((first, second, second)):
            address = session["base_url"].replace(first.url, at.url)
            with openai.OpenAI(base_url=address, api_key=session["api_key"], max_retries=0) as client:
                request: Any = {"model": "any", "input": items, "previous_response_id": previous, "tools": [FUNCTION]}
                response = client.responses.create(**request, instructions="Be brief.")
                if turn == 0:
                    first.process.kill()
                    first.process.wait(300)
            uids.append(response.id)
            calls = [item for item in response.output if item.type == "function_call"]
            items = [{"type": "function_call_output", "call_id": c.call_id, "output": "42"} for c in calls]
            previous = response.id
        assert response.output_text == "42"
        named = {"session_id": session["session_id"]}
        second.post("/rl/set_reward", {**named, "turn_rewards": {uids[1]: 0.5}})
        assert second.post("/rl/end_session", named)[1]["state"] == "finished"
    history = [record for record in calls_of(kafka, run_name, session["session_id"]) if isinstance(record, ModelCall)]
    assert [call.uid for call in history] == uids
    (rollout,) = records(kafka, run_name)
    assert len(engine.sampled) == 3
    assert_is_the_engines_own(rollout, engine)
    assert (rollout.reward, [turn.reward for turn in rollout.turns if turn.role == "assistant"]) == (0.5, [0, 0.5, 0])
    assert ledger(kafka, run_name).balanced


@pytest.mark.parametrize("stream", [False, True])
def test_a_repeated_message_gets_the_recorded_answer_of_another_gateway(
    kafka: KafkaConfig, run_name: str, tmp_path: Path, stream: bool
) -> None:
    engine = RecordedEngine()
    with (
        serving(engine, conversation_cache_tokens=0) as server,
        gateway(kafka, run_name, server.base_url, tmp_path) as first,
        gateway(kafka, run_name, server.base_url, tmp_path, "--ordinal", "1") as second,
    ):
        eventually(lambda: server.version == 3, 60, "weights are loaded")
        session = first.start_session(task_id="sum", environment="sums")
        answers = []
        for at in (first, second):
            address = session["base_url"].replace(first.url, at.url)
            with anthropic.Anthropic(base_url=address, api_key=session["api_key"], max_retries=0) as client:
                request: Any = {"messages": [{"role": "user", "content": "20+22?"}], "max_tokens": 256, "model": "any"}
                if stream:
                    with client.messages.stream(**request, tools=[TOOL]) as events:
                        answers.append(events.get_final_message())
                else:
                    answers.append(client.messages.create(**request, tools=[TOOL]))
    assert answers[0] == answers[1]
    assert [block.type for block in answers[0].content] == ["text", "tool_use"]
    assert len(engine.sampled) == 1
