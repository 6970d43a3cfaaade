"""The gateway in front of a real vLLM: what a loop of tools is trained on is what the engine said that it sampled."""

import json
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
from aiohttp import web

from rollstream.consumers.models.huggingface import load_config
from rollstream.consumers.trainers.step_writer import StepWriter
from rollstream.pipeline.audit.ledger import ledger
from rollstream.producers.gateway.call_forms import parse_request, server_request
from rollstream.producers.inference.requests import ENGINE_NEUTRAL, SampleRequest, engine_request
from rollstream.topics.config import KafkaConfig, TopicsConfig
from rollstream.topics.kafka.provisioning import apply
from rollstream.topics.wire.validation import problems
from tests.engines.conftest import Vllm
from tests.engines.vllm_answers import PROMPT, logprobs, original, sample, version_of
from tests.support.batches import patient
from tests.support.gateways import gateway, records
from tests.support.producing import serving_http
from tests.support.runs import RealRun
from tests.support.vllm_server import ENVIRONMENT
from tests.support.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]

NEUTRAL = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}
PARAMETERS = """
import json, sys
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

checkpoint = dict(top_p=0.8, top_k=20, min_p=0.1, frequency_penalty=0.5, presence_penalty=0.5, repetition_penalty=1.1,
                  temperature=0.5)
requests = zip((ChatCompletionRequest, CompletionRequest), json.load(sys.stdin))
parameters = [kind(**body).to_sampling_params(16, checkpoint) for kind, body in requests]
print(json.dumps([{name: getattr(sampling, name) for name in checkpoint} for sampling in parameters]))
"""
"""A program that prints what vLLM samples two requests with if the checkpoint has sampling parameters of its own."""


@dataclass
class RecordingProxy:
    """Passes requests on to an engine, and keeps the texts of its answers to chats."""

    engine: str
    answers: list[str] = field(default_factory=list)

    async def pass_on(self, request: web.Request) -> web.Response:
        headers = {"Content-Type": request.content_type} if request.can_read_body else {}
        async with (
            aiohttp.ClientSession() as client,
            client.request(request.method, self.engine + request.path, data=await request.read(), headers=headers) as r,
        ):
            body = await r.text()
            if request.path.endswith("/chat/completions"):
                assert r.status == 200, body
                self.answers.append(body)
            return web.Response(status=r.status, text=body, content_type=r.content_type)

    def turns(self) -> list[tuple[list[int], list[int], list[float]]]:
        """Prompt, tokens and log-probabilities of each answer, read from its JSON or from the events of its stream."""
        return [_turn(answer) for answer in self.answers]


def _turn(answer: str) -> tuple[list[int], list[int], list[float]]:
    lines = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: {")]
    bodies = [json.loads(line) for line in lines] if lines else [json.loads(answer)]
    choices = [choice for body in bodies for choice in body["choices"]]
    [prompt] = [body["prompt_token_ids"] for body in bodies if body.get("prompt_token_ids")]
    tokens = [token for choice in choices for token in choice.get("token_ids") or ()]
    logprobs = [entry["logprob"] for choice in choices for entry in (choice.get("logprobs") or {}).get("content") or ()]
    return prompt, tokens, logprobs


@pytest.fixture
def proxy(vllm: Vllm) -> Iterator[tuple[str, RecordingProxy]]:
    proxy = RecordingProxy(vllm.root)
    with serving_http(proxy.pass_on) as url:
        yield url, proxy


def play(client: openai.OpenAI, *, stream: bool) -> list[Any]:
    """Three turns, in each of which the model calls the tool and is told the sum; returns the calls."""
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "20+22?"}]
    calls = []
    for turn in range(3):
        ask: Any = {"model": "any", "messages": messages, "tools": TOOLS, "max_tokens": 16, "seed": turn}
        if stream:
            with client.chat.completions.stream(**ask) as events:
                for _event in events:
                    pass
                message = events.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**ask).choices[0].message
        assert message.tool_calls, message
        [call] = message.tool_calls
        function = {"name": call.function.name, "arguments": call.function.arguments}
        tool_call = {"id": call.id, "type": "function", "function": function}
        messages.append({"role": "assistant", "content": message.content, "tool_calls": [tool_call]})
        total = sum(json.loads(call.function.arguments).values())
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(total)})
        calls.append(function)
    return calls


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_of_tools_is_trained_on_the_tokens_that_vllm_sampled(
    proxy: tuple[str, RecordingProxy], broker: str, run_name: str, tmp_path: Path, stream: bool
) -> None:
    kafka = KafkaConfig(bootstrap_servers=broker)
    apply(kafka, TopicsConfig(partitions=2), run_name)
    url, engine = proxy
    # vLLM names no policy version.
    with gateway(kafka, run_name, url, tmp_path, **{"worker.assume_version": 0}) as under_test:
        session = under_test.start_session(task_id="sum", environment="sums")
        with openai.OpenAI(base_url=session["base_url"], api_key=session["api_key"], max_retries=0) as client:
            calls = play(client, stream=stream)
        name = {"session_id": session["session_id"]}
        under_test.post("/rl/set_reward", {**name, "reward": 1.0})
        ended = under_test.post("/rl/end_session", name)[1]
    assert [call["name"] for call in calls] == ["add"] * 3
    assert (ended["state"], ended["calls"]) == ("finished", 3)
    turns = engine.turns()
    assert len(turns) == 3

    (rollout,) = records(kafka, run_name)
    assert problems(rollout) == []
    length = len(turns[-1][0]) + len(turns[-1][1])
    tokens, mask, logprobs = np.zeros(length, "<i4"), np.zeros(length, bool), np.zeros(length, "<f4")
    for prompt, sampled, sampled_logprobs in turns:
        assert len(sampled) == len(sampled_logprobs) >= 4
        place = slice(len(prompt), len(prompt) + len(sampled))
        tokens[: place.stop] = [*prompt, *sampled]
        mask[place], logprobs[place] = True, sampled_logprobs
    assert rollout.tokens.tobytes() == tokens.tobytes()
    assert rollout.loss_mask.tobytes() == mask.tobytes()
    assert rollout.logprobs.tobytes() == logprobs.tobytes()
    assert len(set(logprobs[mask].tolist())) > 3, "they are a model's, not a constant"
    assert [turn.role for turn in rollout.turns] == ["system", "user", *["assistant", "tool"] * 2, "assistant"]
    book = ledger(kafka, run_name)
    assert book.problems == []
    assert (book.balanced, book.calls["recorded"], book.calls["in_rollouts"]) == (True, 3, 3)


def test_sampling_parameters_of_the_checkpoint_change_no_call_of_a_gateway_and_no_completions() -> None:
    chat = parse_request("chat/completions", {"messages": [{"role": "user", "content": "20+22?"}], "top_k": 5})
    chat_body = server_request(chat, model="policy", temperature=0.9, sampling="run")
    request = SampleRequest(prompt=PROMPT, n=1, max_tokens=4, temperature=0.9, seed=1)
    bodies = [{**ENGINE_NEUTRAL, **chat_body}, engine_request(request, "rollstream", "policy", extensions=True).payload]
    python = ENVIRONMENT / "bin" / "python"
    answer = subprocess.run([python, "-c", PARAMETERS], input=json.dumps(bodies), capture_output=True, text=True)
    sampled = json.loads(answer.stdout.splitlines()[-1])
    assert sampled == [{**NEUTRAL, "temperature": 0.9}] * 2, answer.stderr


def test_a_session_longer_than_vllms_context_is_a_truncated_episode(
    vllm: Vllm, broker: str, run_name: str, tmp_path: Path
) -> None:
    kafka = KafkaConfig(bootstrap_servers=broker)
    apply(kafka, TopicsConfig(partitions=2), run_name)
    with gateway(kafka, run_name, vllm.url, tmp_path, **{"worker.assume_version": 0}) as under_test:
        session = under_test.start_session(task_id="long", environment="sums")
        messages: list[Any] = [{"role": "user", "content": "20+22?"}]
        with openai.OpenAI(base_url=session["base_url"], api_key=session["api_key"], max_retries=0) as client:
            answer = client.chat.completions.create(model="any", messages=messages, max_tokens=8, seed=1)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            messages.append({"role": "user", "content": "more " * 1024})
            with pytest.raises(openai.BadRequestError, match="1024"):
                client.chat.completions.create(model="any", messages=messages, max_tokens=8, seed=1)
        name = {"session_id": session["session_id"]}
        under_test.post("/rl/set_reward", {**name, "reward": 0.25})
        assert under_test.post("/rl/end_session", name)[1]["state"] == "finished"
    (rollout,) = records(kafka, run_name)
    assert (rollout.truncated, rollout.reward) == (True, 0.25)
    assert rollout.loss_mask.sum() > 0


def test_tokens_carry_the_version_that_a_vllm_that_follows_the_run_had(
    run: RealRun, served: Vllm, tmp_path: Path
) -> None:
    config, parameters = load_config(served.directory), original(served)
    apply(run.kafka, TopicsConfig(partitions=2, weights_partitions=2), run.name)
    with (
        StepWriter(patient(run.kafka), run.name, model=json.dumps(asdict(config))) as trainer,
        gateway(run.kafka, run.name, served.url, tmp_path) as under_test,
    ):
        assert under_test.post("/rl/start_session", {"task_id": "t"})[0] == 503, "nobody has named its weights"
        run.start("serve-weights", "--url", served.url, serving__dtype="float32")
        for version, stream in enumerate((False, True)):
            trainer.publish_version(version_of(parameters, version))
            eventually(lambda v=version: sample(served).lowest_version == v, 600, f"vLLM to sample with {version}")
            session = under_test.start_session(group_id=f"g{version}")
            with openai.OpenAI(base_url=session["base_url"], api_key=session["api_key"], max_retries=0) as client:
                answer = client.completions.create(model="any", prompt=PROMPT, max_tokens=16, seed=1, stream=stream)
                assert list(answer)
            reward = {"session_id": session["session_id"], "reward": 1.0}
            under_test.post("/rl/set_reward", reward)
            assert under_test.post("/rl/end_session", reward)[1]["state"] == "finished"
    rollouts = sorted(records(run.kafka, run.name), key=lambda rollout: rollout.group_id)
    assert [(r.lowest_version, r.highest_version) for r in rollouts] == [(0, 0), (1, 1)]
    for version, rollout in enumerate(rollouts):
        assert problems(rollout) == []
        assert rollout.policy_version <= version
        expected = logprobs(rollout.tokens.tolist(), config, version_of(parameters, version))
        sampled = rollout.loss_mask[1:]
        np.testing.assert_allclose(expected[sampled], rollout.logprobs[rollout.loss_mask], atol=2e-3)
