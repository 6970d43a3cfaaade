"""Chats with tools through the gateway, by the official client: the tokens trained are the engine's own, whatever is
killed in between."""

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from rollstream.pipeline.audit.ledger import ledger
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka.reader import Reader
from rollstream.topics.records import ModelCall, SessionEvent
from rollstream.topics.wire.catalogue import topic_name
from tests.support.gateways import calls_of, gateway, post, records
from tests.support.producing import SortedRow, serving
from tests.support.recorded_engine import RecordedEngine, assert_is_the_engines_own
from tests.support.waiting import eventually

TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.fixture
def engine() -> RecordedEngine:
    return RecordedEngine()


@pytest.fixture
def server(engine: RecordedEngine) -> Iterator[str]:
    # The server caches no conversation, so that tokens come from the gateway's records.
    with serving(engine, replica_id="infer-7", conversation_cache_tokens=0) as running:
        eventually(lambda: running.version == 3, 60, "weights are loaded")
        yield running.base_url


def loop_of_tools(client: openai.OpenAI, *, stream: bool = False) -> list[Any]:
    """Three turns with tools; returns the messages of the model."""
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "20+22?"}]
    for _turn in range(3):
        message = streamed(client, messages) if stream else whole(client, messages)
        messages.append(message)
        for call in message.get("tool_calls") or []:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "42"})
    return [message for message in messages if message["role"] == "assistant"]


def whole(client: openai.OpenAI, messages: list[Any]) -> Any:
    answer = client.chat.completions.create(model="gpt-4o", messages=messages, tools=TOOLS)
    assert answer.model_extra == {**(answer.model_extra or {}), "policy_version": 3}
    assert not answer.choices[0].logprobs
    return answer.choices[0].message.model_dump(exclude_unset=True)


def streamed(client: openai.OpenAI, messages: list[Any]) -> Any:
    with client.chat.completions.stream(model="gpt-4o", messages=messages, tools=TOOLS) as events:
        for _event in events:
            pass
        message = events.get_final_completion().choices[0].message.model_dump(exclude_unset=True, mode="json")
    for call in message.get("tool_calls") or []:
        call.pop("index", None)
        call["function"].pop("parsed_arguments", None)
    message.pop("parsed", None)
    return {key: value for key, value in message.items() if value is not None or key == "content"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_of_tools_is_trained_on_the_tokens_of_the_engine(
    kafka: KafkaConfig, run_name: str, server: str, engine: RecordedEngine, tmp_path: Path, stream: bool
) -> None:
    with gateway(kafka, run_name, server, tmp_path) as under_test:
        session = under_test.start_session(task_id="sum", environment="sums")
        with openai.OpenAI(base_url=session["base_url"], api_key=session["api_key"], max_retries=0) as client:
            messages = loop_of_tools(client, stream=stream)
        assert messages[0]["content"].strip() == "I add."
        assert [len(message.get("tool_calls") or []) for message in messages] == [1, 2, 0]
        assert messages[2]["content"] == "42"
        bearer = {"Authorization": f"Bearer {session['session_api_key']}"}
        under_test.post("/rl/set_reward", {"reward": 1.0}, **bearer)
        assert under_test.post("/rl/end_session", {}, **bearer)[1]["state"] == "finished"
    (rollout,) = records(kafka, run_name)
    assert len(engine.sampled) == 3
    assert_is_the_engines_own(rollout, engine)
    roles = ["system", "user", "assistant", "tool", "assistant", "tool", "tool", "assistant"]
    assert [turn.role for turn in rollout.turns] == roles


class GatedEngine(RecordedEngine):
    """Samples one token at a time, and from the third step on only once the test allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens_at_once = 1
        self.go_on = threading.Event()
        self.steps = 0

    def decode(self) -> list[SortedRow]:
        self.steps += 1
        assert self.steps < 3 or self.go_on.wait(300)
        return super().decode()


def test_a_stream_that_repeats_one_in_flight_gets_its_answer_and_samples_nothing(
    kafka: KafkaConfig, run_name: str, tmp_path: Path
) -> None:
    engine = GatedEngine()
    body = {"messages": [{"role": "user", "content": "20+22?"}], "tools": TOOLS, "stream": True}
    contents: list[str] = []

    def content_of(events: httpx.Response) -> str:
        parts = [json.loads(line[6:]) for line in events.iter_lines() if line.startswith("data: {")]
        return "".join(choice["delta"].get("content") or "" for part in parts for choice in part["choices"])

    with serving(engine, conversation_cache_tokens=0) as running, httpx.Client(timeout=300) as client:
        eventually(lambda: running.version == 3, 60, "weights are loaded")
        with gateway(kafka, run_name, running.base_url, tmp_path) as under_test:
            session = under_test.start_session(task_id="sum", environment="sums")
            url = f"{session['base_url']}/chat/completions"
            headers = {"Authorization": f"Bearer {session['api_key']}"}

            def ask() -> None:
                with client.stream("POST", url, json=body, headers=headers) as events:
                    contents.append(content_of(events))

            asking = [threading.Thread(target=ask) for _ in range(2)]
            asking[0].start()
            eventually(lambda: engine.steps >= 3, 60, "the first request is being sampled")
            asking[1].start()
            for _ in range(5):  # The gateway has met the second request by then.
                assert client.get(f"{under_test.url}/livez").status_code == 200
            engine.go_on.set()
            for thread in asking:
                thread.join(300)
            calls = [
                record for record in calls_of(kafka, run_name, session["session_id"]) if isinstance(record, ModelCall)
            ]
    assert contents[0] == contents[1] != ""
    assert (len(engine.sampled), len(calls)) == (1, 1)


def test_a_gateway_killed_after_every_record_of_a_session_loses_and_repeats_nothing(
    kafka: KafkaConfig, run_name: str, server: str, engine: RecordedEngine, tmp_path: Path
) -> None:
    log = Reader(kafka)
    kills = 0

    def length() -> int:
        return sum(end for _begin, end in log.bounds(topic_name(run_name, "calls")).values())

    def attempt(path: str, body: Any) -> dict[str, Any]:
        """The answer of a gateway that is killed as soon as the log has another record; empty if it gave none."""
        nonlocal kills
        answers: list[dict[str, Any]] = []
        with gateway(kafka, run_name, server, tmp_path) as under_test:
            url, before = under_test.url + path, length()

            def ask() -> None:
                status, answer, _headers = post(url, body)
                answers.append(answer if 200 <= status < 300 else {})

            asking = threading.Thread(target=ask)
            asking.start()
            eventually(lambda: answers or length() > before, 60, "an answer or a record", every_s=0.001)
            kills += length() > before
        asking.join()
        return answers[0]

    def request(path: str, body: Any, state: str = "") -> dict[str, Any]:
        while True:
            answer = attempt(path, body)
            if answer and (not state or answer["state"] == state):
                return answer

    with contextlib.closing(log):
        started = request("/rl/start_session", {"task_id": "t", "group_id": "g", "environment": "sums"})
        session = started["session_id"]
        messages: list[Any] = [{"role": "user", "content": "20+22?"}]
        for _turn in range(3):
            body = {"messages": messages, "tools": TOOLS}
            answer = request(f"/sessions/{session}/v1/chat/completions", body)
            message = answer["choices"][0]["message"]
            messages.append(message)
            for call in message.get("tool_calls") or []:
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": "42"})
        request("/rl/set_reward", {"session_id": session, "reward": 0.5})
        ended = request("/rl/end_session", {"session_id": session}, state="finished")
    assert ended["rollouts"] == [session]
    (rollout,) = records(kafka, run_name)
    assert (rollout.uid, rollout.reward) == (session, 0.5)
    assert_is_the_engines_own(rollout, engine)
    history = calls_of(kafka, run_name, session)
    assert sum(isinstance(record, ModelCall) for record in history) == 3, "none was recorded twice"
    kinds = [record.kind for record in history if isinstance(record, SessionEvent)]
    assert (kinds[0], kinds[-1], kinds.count("finished")) == ("start", "finished", 1)
    assert kills >= 6, "at its start, each call, its reward and its end"
    book = ledger(kafka, run_name)
    assert book.problems == []
    assert (book.balanced, book.calls["recorded"], book.calls["in_rollouts"]) == (True, 3, 3)
