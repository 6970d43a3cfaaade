"""The gateway as users start it, on a real Kafka, in front of a real server whose answers are known."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from aiohttp import web

from rollstream.consumers.grouping.testing import example_rollout
from rollstream.producers.episodes.branches import branches_of
from rollstream.producers.episodes.call_sequences import token_digest
from rollstream.producers.gateway.sessions import group_of, partition_of_group
from rollstream.producers.rollout_producer import RolloutProducer
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka import clients, provisioning
from rollstream.topics.kafka.sender import Sender
from rollstream.topics.records import CallAnswer, GroupCancelled, ModelCall, Rollout, SessionEvent, same
from rollstream.topics.wire import codec
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.keys import encode_key
from rollstream.topics.wire.validation import cancellation_problems, problems
from tests.support.gateways import GatewayUnderTest, await_records, calls_of, gateway, post, records
from tests.support.probes import probe
from tests.support.producing import TOKENIZER, SortingGenerator, serving, serving_http
from tests.support.runs import RealRun
from tests.support.untold_offsets import without_first_offsets
from tests.support.waiting import eventually


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """base_url of a server with known answers and policy version 3."""
    with serving(SortingGenerator(versions=(3,)), replica_id="infer-7") as server:
        yield server.base_url


@pytest.fixture(scope="module")
def shared(
    broker: str, server: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RealRun, GatewayUnderTest]]:
    """A run and its gateway, for sessions that need no settings of their own."""
    run = RealRun(KafkaConfig(bootstrap_servers=broker), "agents", tmp_path_factory.mktemp("agents"))
    provisioning.apply(run.kafka, run.topics, run.name)
    with gateway(run.kafka, run.name, server, run.directory) as agents:
        yield run, agents


def made_of(run: RealRun, session: dict[str, Any]) -> list[Any]:
    """Records of the group of a session on `rollouts`."""
    return [record for record in records(run.kafka, run.name) if record.group_id == group_of(session["session_id"])]


def complete(session: dict[str, Any], prompt: Any, **more: Any) -> dict[str, Any]:
    """An answer of the official client, with token ids."""
    client = openai.OpenAI(base_url=session["base_url"], api_key=session["api_key"], max_retries=0)
    extra = {"return_token_ids": True, **more.pop("extra_body", {})}
    answer = client.completions.create(model="gpt-4o", prompt=prompt, extra_body=extra, **more)
    return answer.model_dump()


def play_three_turns(session: dict[str, Any]) -> tuple[list[int], list[bool], list[float]]:
    """Three calls, each of which continues the tokens of the one before: tokens, mask and logprobs as answered."""
    tokens, mask, logprobs = TOKENIZER.encode("429>"), [False] * 4, [0.0] * 4
    for added in (">31>", ">75>", ""):
        choice = complete(session, tokens, seed=2, logprobs=1)["choices"][0]
        assert choice["prompt_token_ids"] == tokens
        sampled, added_tokens = choice["token_ids"], TOKENIZER.encode(added)
        tokens = [*tokens, *sampled, *added_tokens]
        mask += [True] * len(sampled) + [False] * len(added)
        logprobs += [*choice["logprobs"]["token_logprobs"], *[0.0] * len(added)]
    return tokens, mask, logprobs


def test_a_session_becomes_a_rollout_with_the_servers_tokens(shared: tuple[RealRun, GatewayUnderTest]) -> None:
    run, under_test = shared
    session = under_test.start_session(task_id="x", environment="sorting")
    tokens, mask, logprobs = play_three_turns(session)
    calls = [record for record in calls_of(run.kafka, run.name, session["session_id"]) if isinstance(record, ModelCall)]
    assert len(calls) == 3, "recorded before they were answered"
    assert [len(call.prompt) for call in calls] == [4, 4, 4], "prompts hold what they add"
    _status, answer, _ = under_test.post("/rl/set_reward", {"session_id": session["session_id"], "reward": 0.5})
    assert answer["state"] == "open"
    _status, answer, _ = under_test.post("/rl/end_session", {"session_id": session["session_id"]})
    assert (answer["state"], answer["calls"]) == ("finished", 3)
    (rollout,) = made_of(run, session)
    assert problems(rollout) == []
    assert rollout.uid == session["session_id"]
    assert (rollout.environment, rollout.example_id, rollout.reward) == ("sorting", "x", 0.5)
    assert (rollout.tokens.tolist(), rollout.loss_mask.tolist()) == (tokens, mask)
    assert TOKENIZER.decode(rollout.tokens[rollout.loss_mask]) == "2491357"
    assert same(rollout.logprobs, np.array(logprobs, "<f4"))
    versions = rollout.token_arrays["weight_version"].array()
    assert np.array_equal(versions, np.where(rollout.loss_mask, 3, -1))
    assert (rollout.policy_version, rollout.lowest_version, rollout.highest_version) == (3, 3, 3)
    assert rollout.metadata.replica_id == "infer-7"
    assert [turn.role for turn in rollout.turns] == ["user", "assistant"] * 3


def test_a_session_none_of_whose_offsets_the_broker_tells_becomes_one_rollout(
    kafka: KafkaConfig, run_name: str, server: str, tmp_path: Path
) -> None:
    kinds = ["start", "ModelCall", "ModelCall", "ModelCall", "reward", "end", "finishing", "finished"]
    untold = without_first_offsets("rollouts", *["calls"] * len(kinds))
    with gateway(kafka, run_name, server, tmp_path, script=untold) as under_test:
        session = under_test.start_session()
        tokens, _mask, _logprobs = play_three_turns(session)
        name = {"session_id": session["session_id"]}
        assert under_test.post("/rl/set_reward", {**name, "reward": 0.5})[0] == 200
        status, answer, _ = under_test.post("/rl/end_session", name)
        assert (status, answer["state"], answer["calls"]) == (200, "finished", 3)
        there = [getattr(record, "kind", "ModelCall") for record in calls_of(kafka, run_name, session["session_id"])]
        assert there == kinds
    (rollout,) = records(kafka, run_name)
    assert (rollout.tokens.tolist(), rollout.reward) == (tokens, 0.5)


def test_a_rewritten_history_becomes_a_branch(shared: tuple[RealRun, GatewayUnderTest]) -> None:
    run, under_test = shared
    session = under_test.start_session()
    complete(session, "42>", seed=2)
    complete(session, "73>", seed=2)
    under_test.post("/rl/set_reward", {"session_id": session["session_id"], "reward": 1, "components": {"exact": 1}})
    under_test.post("/rl/end_session", {"session_id": session["session_id"]})
    rollouts = made_of(run, session)
    assert [(r.episode_uid, r.branch, r.branches) for r in rollouts] == [(session["session_id"], b, 2) for b in (0, 1)]
    assert [TOKENIZER.decode(r.tokens) for r in rollouts] == ["42>24", "73>37"]
    assert {r.reward for r in rollouts} == {1.0}
    assert {r.reward_components["exact"] for r in rollouts} == {1.0}


def test_any_gateway_serves_any_session(shared: tuple[RealRun, GatewayUnderTest], server: str, tmp_path: Path) -> None:
    run, first = shared
    with gateway(run.kafka, run.name, server, tmp_path, "--ordinal", "1") as second:
        session = first.start_session(group_size=2)["sessions"][1]
        elsewhere = {**session, "base_url": session["base_url"].replace(first.url, second.url)}
        assert complete(session, "42>", seed=2)["choices"][0]["text"] == "24"
        answer = complete(elsewhere, "73>", seed=2)
        repeated = {"prompt": "73>", "model": "gpt-4o", "seed": 2, "return_token_ids": True}
        _status, again, _ = post(f"{session['base_url']}/completions", repeated)
        assert (again["id"], again["choices"][0]["token_ids"]) == (answer["id"], answer["choices"][0]["token_ids"])
        second.post("/rl/set_reward", {"session_id": session["session_id"], "reward": 1})
        _status, ended, _ = first.post("/rl/end_session", {"session_id": session["session_id"]})
        assert (ended["state"], ended["calls"], len(ended["rollouts"])) == ("finished", 2, 2)
        _status, again_ended, _ = second.post("/rl/end_session", {"session_id": session["session_id"]})
        assert again_ended == ended
    assert len(made_of(run, session)) == 2


def test_a_reward_may_come_late_and_twice(shared: tuple[RealRun, GatewayUnderTest]) -> None:
    run, under_test = shared
    session = under_test.start_session()
    call = complete(session, "42>", seed=2)
    name = {"session_id": session["session_id"]}
    assert under_test.post("/rl/end_session", name)[1]["state"] == "waits_for_reward"
    assert made_of(run, session) == []
    reward = {**name, "turn_rewards": {call["id"]: 0.25}, "components": {"exact": 0}}
    assert under_test.post("/rl/set_reward", reward)[1]["state"] == "finished"
    assert under_test.post("/rl/set_reward", reward)[0] == 200
    status, refused, _ = under_test.post("/rl/set_reward", {**name, "reward": 1})
    assert (status, refused["error"]["code"]) == (410, "session_closed")
    status, refused, _ = under_test.post(f"/sessions/{session['session_id']}/v1/completions", {"prompt": "1>"})
    assert (status, refused["error"]["code"]) == (410, "session_closed")
    (rollout,) = made_of(run, session)
    assert rollout.reward == 0.25
    assert rollout.token_rewards.tolist() == [0, 0, 0, 0, 0, 0.25]
    assert rollout.turns[1].reward == 0.25


def test_of_finished_sessions_the_newest_are_remembered(
    kafka: KafkaConfig, run_name: str, server: str, tmp_path: Path
) -> None:
    with gateway(kafka, run_name, server, tmp_path, **{"gateway.remembered_sessions": 2}) as under_test:
        group = under_test.start_session(group_id="g", group_size=3)["sessions"]
        rewards = [{"session_id": session["session_id"], "reward": 1} for session in group]
        for session, reward in zip(group, rewards, strict=True):
            complete(session, "42>", seed=2)
            assert under_test.post("/rl/set_reward", reward)[0] == 200
            assert under_test.post("/rl/end_session", reward)[1]["state"] == "finished"
        assert [under_test.post("/rl/set_reward", reward)[0] for reward in rewards] == [404, 200, 200]


def test_an_invalid_reward_is_a_failure_and_the_rest_of_the_group_is_kept(
    shared: tuple[RealRun, GatewayUnderTest],
) -> None:
    rewards = {b"NaN": "nan", b"1e400": "inf", b'"0.5"': '"0.5"', b"[true]": "[true]"}
    run, under_test = shared
    good, *bad = under_test.start_session(group_size=5)["sessions"]
    for session in (good, *bad):
        complete(session, "42>", seed=2)
        under_test.post("/rl/end_session", {"session_id": session["session_id"]})
    for session, reward in zip(bad, rewards, strict=True):
        body = b'{"session_id": "%s", "reward": %s}' % (session["session_id"].encode(), reward)
        status, refused, _ = under_test.post("/rl/set_reward", body)
        assert (status, refused["error"]["code"]) == (400, "invalid_request")
    under_test.post("/rl/set_reward", {"session_id": good["session_id"], "reward": True})
    *cancelled, rollout = made_of(run, good)
    assert isinstance(rollout, Rollout)
    assert (rollout.uid, rollout.reward, rollout.group_size) == (good["session_id"], 1.0, 5)
    for session, record, shown in zip(bad, cancelled, rewards.values(), strict=True):
        assert isinstance(record, GroupCancelled)
        assert cancellation_problems(record) == []
        assert record.uids == (session["session_id"],)
        assert record.reason.startswith(f"reward is {shown}; it must be a number")
        assert (record.group_id, record.group_size) == (rollout.group_id, 5)


def test_a_session_without_a_record_for_its_time_is_abandoned(
    kafka: KafkaConfig, run_name: str, server: str, tmp_path: Path
) -> None:
    with gateway(kafka, run_name, server, tmp_path, **{"gateway.idle_timeout_s": 4}) as under_test:
        session = under_test.start_session()
        complete(session, "42>", seed=2)
        (cancelled,) = await_records(kafka, run_name, 1, "the abandoned session is cancelled")
        assert (cancelled.uids, cancelled.reason) == ((session["session_id"],), "abandoned: no record came for 4 s")
    events = [r for r in calls_of(kafka, run_name, session["session_id"]) if isinstance(r, SessionEvent)]
    assert "mark" in [event.kind for event in events], "the log ended it, not a clock"


def test_a_call_that_no_server_answers_fails_its_member(kafka: KafkaConfig, run_name: str, tmp_path: Path) -> None:
    async def broken(request: web.Request) -> web.Response:
        if request.path.endswith("/models"):
            return web.json_response({"data": [{"id": "policy", "policy_version": 1}]})
        return web.Response(status=503)

    with (
        serving_http(broken) as url,
        gateway(kafka, run_name, url, tmp_path, **{"worker.request_timeout_s": 0.5}) as under_test,
    ):
        session = under_test.start_session(group_size=2)["sessions"][0]
        status, refused, _ = under_test.post(f"/sessions/{session['session_id']}/v1/completions", {"prompt": "1>"})
        assert (status, refused["error"]["code"]) == (502, "inference_unavailable")
        (cancelled,) = await_records(kafka, run_name, 1, "the member is cancelled")
    assert cancelled.uids == (session["session_id"],)
    assert "a model call failed: no answer from" in cancelled.reason


def test_a_gateway_takes_up_what_another_began_to_write(
    kafka: KafkaConfig, run_name: str, server: str, tmp_path: Path
) -> None:
    with gateway(kafka, run_name, server, tmp_path) as under_test:
        session = under_test.start_session(environment="e")
        for prompt in ("42>", "73>"):
            complete(session, prompt, seed=2)
        under_test.post("/rl/set_reward", {"session_id": session["session_id"], "reward": 1})
    # A gateway that is killed between the first rollout and the second leaves this state.
    name = session["session_id"]
    calls = [record for record in calls_of(kafka, run_name, name) if isinstance(record, ModelCall)]
    first, second = branches_of(calls)
    with RolloutProducer(kafka, run_name) as producer:
        left = example_rollout(
            uid=f"{name}.0",
            environment="e",
            example_id="t",
            tokens=first.tokens,
            loss_mask=first.loss_mask,
            logprobs=first.logprobs,
        )
        producer.send(left)
    topic, partition = topic_name(run_name, "calls"), partition_of_group(group_of(name), 2)
    with Sender(clients.producer(kafka)) as sender:
        for kind in ("end", "finishing"):
            event = SessionEvent(session=name, kind=kind, author="gateway-7", rollouts_end=0)
            sender.send(topic, codec.encode(event), encode_key(name), partition=partition)
    with gateway(kafka, run_name, server, tmp_path, **{"gateway.takeover_s": 1.0}):
        await_records(kafka, run_name, 2, "the second rollout is written")
        eventually(lambda: calls_of(kafka, run_name, name)[-1].kind == "finished", 60, "and on record")
    there, taken_up = records(kafka, run_name)
    assert (there.uid, taken_up.uid) == (f"{name}.0", f"{name}.1")
    assert same(taken_up.tokens, second.tokens)


def test_what_a_gateway_refuses_has_a_reason_and_ends_nothing(
    kafka: KafkaConfig, run_name: str, server: str, tmp_path: Path
) -> None:
    secret = tmp_path / "key"
    secret.write_text("s3cret\n")
    settings = {"gateway.max_sessions": 2, "gateway.api_key": f"file:{secret}"}
    admin = {"Authorization": "Bearer s3cret"}
    with gateway(kafka, run_name, server, tmp_path, **settings) as under_test:

        def code(path: str, body: Any, **headers: str) -> tuple[int, str]:
            status, answer, _ = under_test.post(path, body, **headers)
            return status, answer["error"]["code"]

        assert code("/rl/start_session", {"task_id": "t"})[0] == 401
        _status, group, _ = under_test.post("/rl/start_session", {"task_id": "t", "group_size": 2}, **admin)
        first, second = group["sessions"]
        status, refused, headers = under_test.post("/rl/start_session", {"task_id": "t"}, **admin)
        assert (status, refused["error"]["code"], headers["Retry-After"]) == (429, "no_capacity", "1")
        for fields in ({}, {"task_id": ""}, {"task_id": "t", "group_size": 0}, {"task_id": "t", "group_id": "a/b"}):
            assert code("/rl/start_session", fields, **admin) == (400, "invalid_request")
        own = {"Authorization": f"Bearer {first['session_api_key']}"}
        other = {"Authorization": f"Bearer {second['session_api_key']}"}
        calls = f"/sessions/{first['session_id']}/v1/completions"
        assert code(calls, {"prompt": "42>"})[0] == 401
        assert code(calls, {"prompt": "42>"}, **other)[0] == 401
        assert code("/sessions/x.9/v1/completions", {"prompt": "42>"}, **admin) == (404, "session_not_found")
        for body in (b"{", b"[]", b"\xff", b'{"prompt": ["a", "b"]}', b'{"prompt": 7}', b"[" * 100_000):
            status, refused, _ = under_test.post(calls, body, **own)
            assert 400 <= status < 500, (body[:40], refused)
        for body in (b"{", b"[]", b"{}", b'{"reward": 1, "components": 3}', b'{"turn_rewards": []}'):
            assert code("/rl/set_reward", body, **own)[0] == 400
        assert code("/rl/end_session", {"status": "great"}, **own) == (400, "invalid_request")
        assert under_test.post(calls, {"prompt": "42>", "seed": 2}, **own)[0] == 200, "the session is as it was"
        assert under_test.process.poll() is None


def test_malformed_records_of_others_end_no_gateway_and_take_no_room(
    kafka: KafkaConfig, run_name: str, server: str, tmp_path: Path
) -> None:
    ids, author = np.array([1, 2], "<i4"), "foreign"
    start = SessionEvent(
        session="x.0",
        kind="start",
        author=author,
        environment="e",
        example_id="t",
        group_id="x",
        policy_version=3,
        idle_timeout_ms=1 << 50,
        reward_timeout_ms=1 << 50,
    )
    unfit = CallAnswer(tokens=ids, logprobs=np.zeros(3, "<f4"))
    foreign = [
        replace(start, session="no name"),
        replace(start, group_size=1 << 30),
        replace(start, session="x.1", group_size=0),
        SessionEvent(session="x.1", kind="failed", author=author),
        replace(start, session="x.2"),
        ModelCall(session="x.2", uid="c", request="r", prompt=ids, prompt_digest=token_digest(ids), answers=(unfit,)),
        SessionEvent(session="x.2", kind="reward", author=author, scored=True, reward=1.0),
        SessionEvent(session="x.2", kind="end", author=author),
    ]
    run = RealRun(kafka, run_name, tmp_path)
    with gateway(kafka, run_name, server, tmp_path, **{"gateway.takeover_s": 1.0}) as under_test:
        for record in foreign:
            run.send_bytes("calls", codec.encode(record), encode_key(record.session), partition_of_group("x", 2))
        for name, reason in (("x.1", "group_size is 0"), ("x.2", "has 2 tokens but 3 log-probabilities")):
            eventually(lambda name=name: calls_of(kafka, run_name, name)[-1].kind == "finished", 60, f"{name} ends")
            assert reason in calls_of(kafka, run_name, name)[-1].reason
        session = under_test.start_session(environment="e")
        complete(session, "42>", seed=2)
        under_test.post("/rl/set_reward", {"session_id": session["session_id"], "reward": 1})
        under_test.post("/rl/end_session", {"session_id": session["session_id"]})
        assert under_test.process.poll() is None
        exposed = probe(f"{under_test.url}/metrics")[1]
        [skipped] = re.findall(r"^rollstream_gateway_records_skipped_total (\S+)", exposed, re.MULTILINE)
        assert float(skipped) > 0
        log = under_test.log.read_text()
    cancelled, rollout = records(kafka, run_name)
    assert isinstance(cancelled, GroupCancelled)
    assert (cancelled.uids, rollout.uid) == (("x.2",), session["session_id"])
    assert ("record_skipped" in log, "cancellation_refused" in log) == (True, True)
