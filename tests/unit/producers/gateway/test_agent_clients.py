"""The official clients of Responses and Messages play episodes: the rollouts hold the engine's own tokens."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import httpx
import openai
import pytest

from rollstream.producers.config import WorkerConfig
from rollstream.producers.environments.environment import Endpoint, Score
from rollstream.producers.flow.policy_versions import NoPolicies
from rollstream.producers.gateway.config import GatewayConfig
from rollstream.producers.gateway.service import EpisodeStamp
from rollstream.producers.worker.local_gateway import LocalGateway
from rollstream.topics.config import KafkaConfig
from rollstream.topics.records import Rollout
from tests.support.producing import serving
from tests.support.recorded_engine import RecordedEngine, assert_is_the_engines_own
from tests.support.waiting import eventually

STAMP = EpisodeStamp(environment="sums", example_id="t", group_id="g", group_size=1, member=0, policy_version=3)
SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
FUNCTION: Any = {"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA, "strict": True}
TOOL: Any = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
Play = Callable[[Endpoint], Awaitable[None]]


def rollouts_of(engine: RecordedEngine, play: Play) -> list[Rollout]:
    """The rollouts of an episode that is played against an engine, through a gateway in memory."""

    async def episode(url: str) -> list[Rollout]:
        worker = WorkerConfig(inference_urls=(url,))
        local = LocalGateway(
            KafkaConfig(),
            "run",
            worker,
            GatewayConfig(),
            name="w",
            policies=NoPolicies(),
            temperatures={},
            recorded=False,
        )
        async with local as gateway:
            session = await gateway.open(STAMP)
            await play(gateway.endpoint_of(session))
            return [*await gateway.finish(session, Score(reward=1.0))]

    # The server caches no conversation, so that tokens come from the gateway's records.
    with serving(engine, conversation_cache_tokens=0) as server:
        eventually(lambda: server.version == 3, 60, "weights are loaded")
        return asyncio.run(episode(server.base_url))


def assert_trained_as_sampled(engine: RecordedEngine, rollouts: list[Rollout], texts: list[str]) -> None:
    (rollout,) = rollouts
    assert len(engine.sampled) == 3
    assert_is_the_engines_own(rollout, engine)
    assert [turn.role for turn in rollout.turns] == [
        "system", "user", "assistant", "tool", "assistant", "tool", "tool", "assistant",
    ]  # fmt: skip
    assert texts == ["I add.", "", "42"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("continued", [False, True])
def test_a_loop_of_tools_in_responses_is_trained_on_the_tokens_of_the_engine(continued: bool, stream: bool) -> None:
    """`continued` sends what is new and previous_response_id, otherwise the agent sends the whole conversation."""
    texts: list[str] = []

    async def play(endpoint: Endpoint) -> None:
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as client:
            items: list[Any] = [{"role": "user", "content": "20+22?"}]
            previous: Any = openai.omit
            for _turn in range(3):
                request: Any = {"input": items, "tools": [FUNCTION], "previous_response_id": previous}
                request |= {"model": "any", "instructions": "Be brief."}
                if stream:
                    async with client.responses.stream(**request) as events:
                        streamed = [event async for event in events]
                        response: Any = await events.get_final_response()
                    deltas = [e.delta for e in streamed if e.type == "response.output_text.delta"]
                    assert "".join(deltas) == response.output_text
                    assert [event.sequence_number for event in streamed] == [*range(len(streamed))]
                else:
                    response = await client.responses.create(**request)
                assert (response.status, response.usage.total_tokens > 0) == ("completed", True)
                texts.append(response.output_text.strip())
                calls = [item for item in response.output if item.type == "function_call"]
                assert all(call.name == "add" and call.arguments == '{"a": 20, "b": 22}' for call in calls)
                results = [{"type": "function_call_output", "call_id": c.call_id, "output": "42"} for c in calls]
                if continued:
                    items, previous = results, response.id
                else:
                    items += [*(item.model_dump(exclude_unset=True) for item in response.output), *results]

    engine = RecordedEngine()
    engine.tokens_at_once = 3
    assert_trained_as_sampled(engine, rollouts_of(engine, play), texts)


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_of_tools_in_messages_is_trained_on_the_tokens_of_the_engine(stream: bool) -> None:
    texts: list[str] = []

    async def play(endpoint: Endpoint) -> None:
        async with anthropic.AsyncAnthropic(
            base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0
        ) as client:
            messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "20+22?"}]}]
            for _turn in range(3):
                request: Any = {"model": "any", "messages": messages, "tools": [TOOL], "system": "Be brief."}
                counted = await client.messages.count_tokens(**request, extra_body={"max_tokens": 5})
                if stream:
                    async with client.messages.stream(**request, max_tokens=256) as events:
                        streamed = [text async for text in events.text_stream]
                        message: Any = await events.get_final_message()
                    assert "".join(streamed) == "".join(b.text for b in message.content if b.type == "text")
                else:
                    message = await client.messages.create(**request, max_tokens=256)
                calls = [block for block in message.content if block.type == "tool_use"]
                assert message.stop_reason == ("tool_use" if calls else "end_turn")
                assert message.usage.input_tokens == counted.input_tokens > 0
                assert all((call.name, call.input) == ("add", {"a": 20, "b": 22}) for call in calls)
                texts.append("".join(block.text for block in message.content if block.type == "text").strip())
                messages.append({"role": "assistant", "content": message.content})
                results = [{"type": "tool_result", "tool_use_id": call.id, "content": "42"} for call in calls]
                messages.append({"role": "user", "content": results})

    engine = RecordedEngine()
    engine.tokens_at_once = 3
    rollouts = rollouts_of(engine, play)
    assert len(engine.sampled) == 6, "three calls, and three counts, which are not recorded"
    assert {len(row.tokens) for _prompt, row in engine.sampled[::2]} == {1}
    del engine.sampled[::2]
    assert_trained_as_sampled(engine, rollouts, texts)


def test_refusals_reach_each_client_in_the_form_of_its_dialect() -> None:
    async def play(endpoint: Endpoint) -> None:
        names = {"base_url": endpoint.base_url, "api_key": endpoint.api_key, "max_retries": 0}
        async with openai.AsyncOpenAI(**names) as client, anthropic.AsyncAnthropic(**names) as other:
            with pytest.raises(openai.BadRequestError, match="background=True is not supported here") as refused:
                await client.responses.create(model="m", input="1+1?", background=True)
            assert (refused.value.param, refused.value.type) == ("background", "invalid_request_error")
            with pytest.raises(openai.BadRequestError, match=r"tool_choice=.required. names no tool"):
                await client.responses.create(model="m", input="1?", tool_choice="required")
            with pytest.raises(
                openai.NotFoundError, match=r"POST .*/embeddings is not spoken here; .* responses, messa"
            ):
                await client.embeddings.create(model="m", input="1+1?")
            with pytest.raises(openai.APIStatusError, match=r"GET .*/responses/resp_1 is not spoken here"):
                await client.responses.retrieve("resp_1")
            user: Any = {"role": "user", "content": "1+1?"}
            for stream in (False, True):
                with pytest.raises(anthropic.BadRequestError) as unspoken:
                    await other.messages.create(
                        model="m", messages=[user], max_tokens=1, stream=stream, extra_body={"mcp_servers": [{}]}
                    )
                error = {"type": "invalid_request_error", "message": unspoken.value.body["error"]["message"]}  # type: ignore[index]
                assert unspoken.value.body == {"type": "error", "error": error}
                assert "mcp_servers=[{}] is not supported here" in error["message"]
            with pytest.raises(anthropic.BadRequestError, match="tokens; this server accepts"):
                await other.messages.create(model="m", messages=[{**user, "content": "1" * 4096}], max_tokens=1)
            with pytest.raises(anthropic.NotFoundError, match=r"messages/batches is not spoken here") as missing:
                await other.messages.batches.list()
            assert missing.value.type == "not_found_error"
            await other.messages.create(model="m", messages=[user], max_tokens=1)
        async with httpx.AsyncClient() as http:  # Earlier clients of Anthropic send the key so.
            body = {"model": "m", "messages": [user], "max_tokens": 1}
            answer = await http.post(
                f"{endpoint.base_url}/messages", json=body, headers={"x-api-key": endpoint.api_key}
            )
            assert answer.status_code == 200
        async with anthropic.AsyncAnthropic(**{**names, "api_key": "wrong"}) as stranger:
            with pytest.raises(anthropic.NotFoundError, match=r"no episode .* is being played with this key"):
                await stranger.messages.create(model="m", messages=[user], max_tokens=1)

    (rollout,) = rollouts_of(RecordedEngine(), play)
    assert rollout.truncated, "the answer has one token"
