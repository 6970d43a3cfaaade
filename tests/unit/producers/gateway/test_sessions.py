"""Sessions as a fold of their records: who ends them, what counts, and who writes their rollouts."""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.producers.episodes.branches import branches_of
from rollstream.producers.episodes.call_sequences import token_digest
from rollstream.producers.flow.policy_versions import PolicyVersions
from rollstream.producers.gateway.episode_rollouts import RolloutForm, cancellation_of, rollouts_of
from rollstream.producers.gateway.sessions import (
    CapturedSession,
    PartitionSessions,
    episode_of,
    group_of,
    session_key,
    session_name,
    session_of_key,
)
from rollstream.topics.errors import RecordError
from rollstream.topics.records import AnswerSpan, CallAnswer, ModelCall, SessionEvent
from rollstream.topics.wire.media import image_part, media_of
from rollstream.topics.wire.validation import cancellation_problems, problems

START = SessionEvent(
    session="g.0",
    kind="start",
    author="a",
    environment="e",
    example_id="t",
    group_id="g",
    group_size=2,
    policy_version=4,
    idle_timeout_ms=100,
    reward_timeout_ms=1000,
)
POLICIES = PolicyVersions()
POLICIES.steps[4] = 40
FORM = RolloutForm(logprobs_mode="processed", temperature=1.0)


def call(number: int, prompt: tuple[int, ...] = (), version: int = 4, **change: Any) -> ModelCall:
    ids = np.array(prompt or (number, 7), "<i4")
    answer = CallAnswer(
        tokens=np.array([1, 2], "<i4"),
        logprobs=np.array([-0.5, -0.25], "<f4"),
        spans=(AnswerSpan(label=str(version), version=version, start=0, stop=2),),
    )
    fields = {
        "session": "g.0",
        "uid": f"c{number}",
        "request": f"r{number}",
        "prompt": ids,
        "prompt_digest": token_digest(ids),
        "answers": (answer,),
        "sampling": {"temperature": "1.0"},
    }
    return ModelCall(**{**fields, **change})


def event(kind: Any, **fields: Any) -> SessionEvent:
    return SessionEvent(**{"session": "g.0", "kind": kind, "author": "a", **fields})


def folded(*records: tuple[int, ModelCall | SessionEvent]) -> CapturedSession:
    """The session after records with their append times."""
    fold = PartitionSessions()
    for offset, (append_ms, record) in enumerate([(0, START), *records]):
        fold.apply(offset, append_ms, record)
    return fold.sessions["g.0"]


def test_a_session_with_calls_an_end_and_a_reward_becomes_rollouts() -> None:
    for order in (("end", "reward"), ("reward", "end")):
        changes = [(2, event(kind, scored=kind == "reward", reward=0.5)) for kind in order]
        session = folded((1, call(0)), *changes)
        assert session.closed
        assert not session.closed.cancelled
        (rollout,) = rollouts_of(session, FORM, POLICIES)
        assert problems(rollout) == []
        assert (rollout.uid, rollout.episode_uid, rollout.reward, rollout.policy_version) == ("g.0", "g.0", 0.5, 4)
        assert rollout.metadata.weight_step == 40


def test_images_of_the_messages_of_a_conversation_are_images_of_its_rollout() -> None:
    def asked(url: str, text: str) -> dict[str, Any]:
        image = {"type": "image_url", "image_url": {"url": url}}
        return {"role": "user", "content": [{"type": "text", "text": text}, image, image]}

    png = image_part("image/png", b"\x89PNG")["image_url"]["url"]
    messages = [asked(png, "see "), {"role": "assistant", "content": "a dot"}, asked(png.replace("png", "gif"), "")]
    first = call(0, messages=json.dumps(messages[:1]))
    second = call(1, (0, 7, 1, 2, 9), parent="c0", shared=4, messages_shared=1, messages=json.dumps(messages[1:]))
    second = replace(second, prompt=second.prompt[4:])
    (rollout,) = rollouts_of(folded((1, first), (2, second), (3, event("end"))), FORM, POLICIES)
    assert problems(rollout) == []
    texts = [turn.text for turn in rollout.turns if turn.role == "user"]
    assert texts == ["see [image 1][image 2]", "[image 3][image 4]"]
    media = [(medium.media_type, medium.data) for medium in media_of(rollout.token_arrays)]
    assert media == [("image/png", b"\x89PNG")] * 2 + [("image/gif", b"\x89PNG")] * 2

    elsewhere = call(0, messages=json.dumps([asked("https://example.org/cat.png", "see")]))
    with pytest.raises(RecordError, match="a record needs its bytes"):
        rollouts_of(folded((1, elsewhere), (2, event("end"))), FORM, POLICIES)


def test_only_the_branch_that_a_call_too_long_would_have_continued_is_truncated_and_only_if_it_ends_there() -> None:
    def truncated(*later: ModelCall) -> list[tuple[list[int], bool]]:
        closing = (event("end"), event("reward", scored=True))
        records = (call(0), call(1), event("truncated", uids=("c0",)), *later, *closing)
        rollouts = rollouts_of(folded(*((1, record) for record in records)), FORM, POLICIES)
        return sorted((rollout.tokens.tolist(), rollout.truncated) for rollout in rollouts)

    assert truncated() == [([0, 7, 1, 2], True), ([1, 7, 1, 2], False)]
    shorter = call(2, prompt=(0, 7, 1, 2, 9))
    assert truncated(shorter) == [([0, 7, 1, 2, 9, 1, 2], False), ([1, 7, 1, 2], False)]


def test_an_episode_whose_calls_sampled_no_token_is_an_error_and_no_empty_list_of_rollouts() -> None:
    nothing = CallAnswer(tokens=np.array([], "<i4"), logprobs=np.array([], "<f4"), spans=())
    session = folded((1, call(0, answers=(nothing,))), (2, event("reward", scored=True, reward=0.5)))
    with pytest.raises(RecordError, match=r"^no model call of session g\.0 sampled a token"):
        rollouts_of(session, FORM, POLICIES)


def test_rollouts_and_cancellations_of_a_further_attempt_are_those_of_the_episode() -> None:
    name = session_name("g", 0, 2)
    fold = PartitionSessions()
    records = (replace(START, session=name), call(0, session=name), event("end", session=name))
    for offset, record in enumerate(records):
        fold.apply(offset, 0, record)
    fold.apply(3, 0, event("reward", session=name, scored=True, reward=0.5))
    (rollout,) = rollouts_of(fold.sessions[name], FORM, POLICIES)
    assert (rollout.uid, rollout.episode_uid, rollout.extra["session"]) == ("g.0", "g.0", "g.0-2")
    assert cancellation_of(fold.sessions[name], "why").uids == ("g.0",)


def test_a_mark_abandons_a_session_only_after_its_time_by_append_times() -> None:
    assert folded((50, call(0)), (149, event("mark"))).closed is None
    closed = folded((50, call(0)), (150, event("mark"))).closed
    assert closed
    assert closed.reason == "abandoned: no record came for 0.1 s"
    assert folded((50, call(0)), (900, call(1)), (950, event("mark"))).closed is None, "only marks end a session"


def test_an_abandoned_session_with_a_reward_is_not_lost() -> None:
    session = folded((1, call(0)), (2, event("reward", scored=True, reward=1.0)), (200, event("mark")))
    assert session.closed
    assert not session.closed.cancelled


def test_an_ended_session_waits_for_its_reward_until_a_mark_after_its_time() -> None:
    assert folded((1, call(0)), (2, event("end")), (1001, event("mark"))).closed is None
    closed = folded((1, call(0)), (2, event("end")), (1002, event("mark"))).closed
    assert closed
    assert closed.reason == "no reward came for 1 s after the end"


@pytest.mark.parametrize("reward", [math.nan, math.inf, -1e31])
def test_an_invalid_reward_cancels_and_is_never_zero(reward: float) -> None:
    for name, change in (
        ("reward", {"scored": True, "reward": reward}),
        ("components.x", {"components": {"x": reward}}),
        ("turn_rewards.0", {"turn_rewards": {"0": reward}}),
    ):
        session = folded((1, call(0)), (2, event("reward", **change)), (3, event("reward", scored=True, reward=1.0)))
        assert session.closed
        assert session.closed.reason.startswith(f"{name} is {reward}; it must be a number between")
        assert cancellation_problems(cancellation_of(session, session.closed.reason)) == []


def test_a_session_without_a_call_becomes_no_rollout() -> None:
    closed = folded((1, event("reward", scored=True, reward=1.0)), (2, event("end"))).closed
    assert closed
    assert closed.reason == "no model call was made"
    closed = folded((1, event("truncated", reason="300 tokens")), (2, event("end"))).closed
    assert closed
    assert closed.reason == "no model call was made: 300 tokens"


def test_a_call_after_the_end_is_in_no_rollout() -> None:
    session = folded((1, call(0)), (2, event("end")), (3, call(1)), (4, event("reward", scored=True)))
    assert (session.counted_calls, session.late_calls) == (1, 1)
    assert len(rollouts_of(session, FORM, POLICIES)) == 1


def test_of_retries_the_first_on_the_log_counts() -> None:
    session = folded((1, call(0)), (2, call(0, uid="again")), (3, call(1, request="r0", repetition=1)))
    assert [counted.uid for counted in session.answered("r0")] == ["c0", "c1"]
    assert (session.counted_calls, session.retried_calls) == (2, 1)


def test_rewards_of_calls_by_uid_or_number_lie_on_the_last_token_of_their_answers() -> None:
    continued = call(1, prompt=(0, 7, 1, 2, 9))
    rewards = event("reward", turn_rewards={"c0": 0.25, "1": 0.5})
    (rollout,) = rollouts_of(folded((1, call(0)), (2, continued), (3, rewards), (4, event("end"))), FORM, POLICIES)
    assert rollout.reward == 0.75
    assert rollout.token_rewards.tolist() == [0, 0, 0, 0.25, 0, 0, 0.5]
    assert [turn.reward for turn in rollout.turns] == [0, 0.25, 0, 0.5]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            {"answers": (CallAnswer(tokens=np.array([1], "<i4"), logprobs=np.zeros(1, "<f4")),)},
            "does not say which policy",
        ),
        ({"sampling": {"presence_penalty": "0.5"}}, "presence_penalty=0.5"),
        ({"sampling": {"temperature": "hot"}}, "not numbers"),
    ],
)
def test_what_cannot_be_trained_on_has_a_reason(changed: dict[str, Any], reason: str) -> None:
    session = folded((1, call(0, **changed)), (2, event("reward", scored=True)), (3, event("end")))
    with pytest.raises(RecordError, match=reason):
        rollouts_of(session, FORM, POLICIES)


def test_a_reward_for_a_call_that_was_not_made_has_a_reason() -> None:
    session = folded((1, call(0)), (2, event("reward", turn_rewards={"7": 1.0})), (3, event("end")))
    with pytest.raises(RecordError, match="a reward is for call 7, which session g"):
        rollouts_of(session, FORM, POLICIES)


def test_the_first_intent_writes_until_its_time_is_over_by_append_times() -> None:
    def intents(*written: tuple[int, str]) -> str:
        session = folded(*((at, event("finishing", author=author)) for at, author in written))
        writer = session.writer(10)
        assert writer
        return writer.author

    assert intents((5, "a"), (6, "b")) == "a"
    assert intents((5, "a"), (15, "b"), (16, "c")) == "b"
    assert intents((5, "a"), (9, "a"), (16, "b")) == "a", "one that restarts goes on"


def test_a_group_is_stamped_with_the_version_of_its_first_start() -> None:
    fold = PartitionSessions()
    fold.apply(0, 0, START)
    fold.apply(1, 0, replace(START, session="g.1", member=1, policy_version=5))
    assert {session.policy_version for session in fold.sessions.values()} == {4}


def test_a_gateway_remembers_the_newest_finished_sessions_and_all_open_ones() -> None:
    fold = PartitionSessions(keep_finished=2)
    for number in range(5):
        start = replace(START, session=f"g.{number}", member=number, group_size=5)
        fold.apply(2 * number, 0, start)
        if number != 1:
            fold.apply(2 * number + 1, 0, event("finished", session=start.session, reason="over"))
    assert [*fold.sessions] == ["g.1", "g.3", "g.4"]
    assert [*fold.open] == ["g.1"]
    fold.apply(10, 0, event("finished", session="g.1", reason="over"))
    fold.apply(11, 0, event("finished", session="g.1", reason="again"))
    assert {*fold.sessions} == {"g.1", "g.4"}


def test_records_of_no_session_and_records_that_do_not_fit_end_nothing() -> None:
    fold = PartitionSessions()
    fold.apply(0, 0, call(0))
    fold.apply(1, 0, START)
    fold.apply(2, 0, call(1, prompt_digest="other"))
    assert (fold.orphans, len(fold.problems)) == (1, 1)
    closed = fold.sessions["g.0"].closed
    assert closed
    assert "does not match its digest" in closed.reason


@pytest.mark.parametrize("logprobs", [[], [-0.5], [-0.5, -0.25, -0.125]])
def test_a_call_without_one_log_probability_for_each_token_cancels_its_episode(logprobs: list[float]) -> None:
    answer = CallAnswer(tokens=np.array([1, 2], "<i4"), logprobs=np.array(logprobs, "<f4"))
    unfit = call(0, answers=(answer,))
    session = folded((1, unfit), (2, event("reward", scored=True, reward=0.5)), (3, event("end")))
    assert session.closed
    assert session.closed.reason == (
        f"answer 0 of call c0 of session g.0 has 2 tokens but {len(logprobs)} log-probabilities"
    )
    with pytest.raises(RecordError, match="has 2 tokens"):
        branches_of([unfit])


KINDS = st.sampled_from(["reward", "failed", "end", "mark", "truncated"])


@given(st.lists(st.tuples(st.integers(0, 200), KINDS | st.integers(0, 3)), max_size=12), st.data())
def test_once_finished_nothing_changes_a_session(parts: list[tuple[int, Any]], data: st.DataObject) -> None:
    at, records = 0, []
    for number, (step, part) in enumerate(parts):
        at += step
        records.append((at, call(part, uid=f"u{number}") if isinstance(part, int) else event(part, scored=True)))
    cut = data.draw(st.integers(0, len(records)))
    finished = event("finished", uids=("g.0",))
    session = folded(*records[:cut], (at, finished), *records[cut:])
    alone = folded(*records[:cut], (at, finished))
    assert session.closed == alone.closed
    assert (session.counted_calls, session.finished) == (alone.counted_calls, finished)


@given(st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,30}", fullmatch=True), st.integers(0, 99), st.text())
def test_a_session_is_known_by_its_name_and_its_key(group: str, member: int, secret: str) -> None:
    session = session_name(group, member)
    assert group_of(session) == group
    assert episode_of(session) == session
    again = session_name(group, member, 2)
    assert (group_of(again), episode_of(again)) == (group, session)
    assert session_of_key(session_key(session, secret), secret) == session
    assert session_of_key(session_key(session, secret), secret + "x") is None or len(secret.encode()) >= 64
    assert session_of_key(session, secret) is None


@pytest.mark.parametrize("group", ["", "a/b", "a b", "ä", ".a", "x" * 201])
def test_a_group_that_cannot_stand_in_a_url_is_refused(group: str) -> None:
    with pytest.raises(RecordError, match="cannot be part of a URL"):
        session_name(group, 0)


def test_the_first_end_of_a_session_counts() -> None:
    session = folded((1, call(0)), (2, event("finished", uids=("g.0",))), (3, event("finished", reason="too late")))
    assert session.finished is not None
    assert (session.finished.uids, session.closed.cancelled if session.closed else None) == (("g.0",), False)
