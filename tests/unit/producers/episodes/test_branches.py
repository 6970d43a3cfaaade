"""Branches of episodes: exact token prefixes, every sampled token trained once, retries without effect."""

import json
import tracemalloc
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.producers.episodes.branches import Branch, branches_of, distinct
from rollstream.producers.episodes.call_sequences import CallSequences
from rollstream.topics.errors import RecordError
from rollstream.topics.records import AnswerSpan, CallAnswer, Int32, ModelCall, same
from rollstream.topics.wire.codec import decode, encode


def tokens(*ids: int) -> Int32:
    return np.array(ids, "<i4")


@dataclass
class Recording:
    """Records calls as a gateway does: each prompt as its difference from what is known."""

    calls: list[ModelCall] = field(default_factory=list)
    sequences: CallSequences = field(default_factory=CallSequences)

    def call(self, prompt: Int32, *answers: Int32, messages: list[dict[str, str]] | None = None) -> ModelCall:
        number = len(self.calls)
        delta = self.sequences.delta_of(prompt, messages or [])
        call = ModelCall(
            session="s",
            uid=f"c{number}",
            number=number,
            request=f"r{number}",
            parent=delta.parent,
            parent_answer=delta.parent_answer,
            shared=delta.shared,
            prompt=delta.prompt,
            prompt_digest=delta.digest,
            messages_shared=delta.messages_shared,
            messages=delta.messages,
            answers=tuple(
                CallAnswer(
                    tokens=answer,
                    logprobs=-np.arange(1, len(answer) + 1, dtype="<f4") / (number + 1),
                    spans=(AnswerSpan(label=str(number), version=number, start=0, stop=len(answer)),),
                    text=f"answer {number}",
                )
                for answer in answers
            ),
        )
        call = decode(encode(call))
        self.sequences.add(call)
        self.calls.append(call)
        return call

    def whole(self, uid: str, answer: int = 0) -> Int32:
        return self.sequences.by_uid[uid].with_answer(answer)


def as_written(branches: list[Branch]) -> list[tuple[object, ...]]:
    return [(b.tokens.tolist(), b.loss_mask.tolist(), b.logprobs.tobytes(), b.versions.tolist()) for b in branches]


def test_a_conversation_that_only_grows_is_one_branch() -> None:
    recording = Recording()
    recording.call(tokens(1, 2), tokens(3, 4), messages=[{"role": "user", "content": "hello"}])
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "answer 0"}]
    asked_again = [*messages, {"role": "tool", "content": "42"}, {"role": "user", "content": "so?"}]
    recording.call(tokens(1, 2, 3, 4, 5), tokens(6), messages=asked_again)
    (branch,) = branches_of(recording.calls)
    assert branch.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert branch.loss_mask.tolist() == [False, False, True, True, False, True]
    assert branch.versions.tolist() == [-1, -1, 0, 0, -1, 1]
    assert branch.logprobs.tolist() == [0, 0, -1, -2, 0, -0.5]
    assert [(t.role, t.text, t.start, t.stop) for t in branch.turns] == [
        ("user", "hello", 0, 2),
        ("assistant", "answer 0", 2, 4),
        ("tool", "42", 4, 4),
        ("user", "so?", 4, 5),
        ("assistant", "answer 1", 5, 6),
    ]


def test_a_record_holds_only_what_its_prompt_adds() -> None:
    recording = Recording()
    recording.call(tokens(*range(1000)), tokens(1, 2))
    later = recording.call(np.concatenate([recording.whole("c0"), tokens(7)]), tokens(8))
    assert (later.parent, later.shared, later.prompt.tolist()) == ("c0", 1002, [7])


def test_calls_of_a_session_take_memory_in_proportion_to_its_tokens() -> None:
    recording = Recording()
    prompt = added = np.arange(1000, dtype="<i4")
    tracemalloc.start()
    try:
        for _ in range(200):
            call = recording.call(prompt, tokens(1))
            prompt = np.concatenate([recording.whole(call.uid), added])
        size_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The calls add 200,000 tokens of four bytes; whole prompts would have 20 million tokens.
    assert size_bytes < 8_000_000


def test_a_rewritten_history_begins_a_branch_that_trains_only_what_was_sampled_in_it() -> None:
    recording = Recording()
    recording.call(tokens(1, 2), tokens(3, 4))
    recording.call(tokens(1, 2, 9, 5), tokens(6))
    first, second = branches_of(recording.calls)
    assert first.tokens.tolist() == [1, 2, 3, 4]
    assert (second.tokens.tolist(), second.loss_mask.tolist()) == ([1, 2, 9, 5, 6], [False] * 4 + [True])


def test_an_answer_shared_by_branches_is_trained_in_the_first() -> None:
    recording = Recording()
    recording.call(tokens(1), tokens(2))
    recording.call(tokens(1, 2, 3), tokens(4))
    recording.call(tokens(1, 2, 5), tokens(6))
    first, second = branches_of(recording.calls)
    assert first.loss_mask.tolist() == [False, True, False, True]
    assert (second.tokens.tolist(), second.loss_mask.tolist()) == ([1, 2, 5, 6], [False, False, False, True])
    assert second.logprobs.tolist()[1] == 0
    assert [place.trained for place in second.calls] == [False, True]


def test_an_answer_of_a_constrained_form_is_context_and_never_trained() -> None:
    recording = Recording()
    recording.call(tokens(1, 2), tokens(3, 4))
    recording.call(tokens(1, 2, 3, 4, 5), tokens(6, 7))
    recording.call(tokens(1, 2, 3, 4, 5, 6, 7, 8), tokens(9))
    recording.call(tokens(20), tokens(21))
    forced = {"constrained": "tool_choice", "tool_choice": "required"}
    first, second, third, other = recording.calls
    [branch] = branches_of([first, replace(second, sampling=forced), third, replace(other, sampling=forced)])
    assert branch.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert np.flatnonzero(branch.loss_mask).tolist() == [2, 3, 8]
    assert branch.versions.tolist() == [-1, -1, 0, 0, -1, -1, -1, -1, 2]
    assert branch.logprobs[5:7].tolist() == [0, 0]
    answers = [turn for turn in branch.turns if turn.role == "assistant"]
    assert [turn.has_logprobs for turn in answers] == [True, False, True]
    assert answers[1].inference is not None
    assert answers[1].inference.sampling_params == forced, "the learner is told what was masked"
    alone = Recording().call(tokens(20), tokens(21))
    assert branches_of([replace(alone, sampling=forced)]) == []


def test_several_answers_of_one_call_are_several_branches() -> None:
    recording = Recording()
    recording.call(tokens(1), tokens(2), tokens(2))
    assert [b.loss_mask.tolist() for b in branches_of(recording.calls)] == [[False, True], [False, True]]


def test_a_session_without_calls_has_no_branch() -> None:
    assert branches_of([]) == []


def test_a_record_that_does_not_fit_is_refused() -> None:
    recording = Recording()
    recording.call(tokens(1, 2), tokens(3))
    later = recording.call(tokens(1, 2, 3, 4), tokens(5))
    with pytest.raises(RecordError, match="does not match its digest"):
        branches_of([recording.calls[0], replace(later, prompt=tokens(7))])
    with pytest.raises(RecordError, match="continues call c0, which session s does not have"):
        branches_of([later])


IDS = st.lists(st.integers(0, 3), min_size=1, max_size=4).map(lambda ids: tokens(*ids))


@st.composite
def recordings(draw: st.DrawFn) -> Recording:
    """Calls of an agent that continues any of its conversations, or rewrites history from any token on."""
    recording = Recording()
    for _ in range(draw(st.integers(1, 8))):
        prompt = draw(IDS)
        if recording.calls and draw(st.booleans()):
            before = draw(st.sampled_from(recording.calls))
            whole = recording.whole(before.uid, draw(st.integers(0, len(before.answers) - 1)))
            kept = len(whole) if draw(st.booleans()) else draw(st.integers(0, len(whole)))
            prompt = np.concatenate([whole[:kept], prompt[draw(st.integers(0, len(prompt) - 1)) :]])
        recording.call(prompt, *draw(st.lists(IDS, min_size=1, max_size=2)))
    return recording


@given(recordings(), st.data())
def test_every_sampled_token_is_trained_once_in_exact_sequences_whatever_is_retried(
    recording: Recording, data: st.DataObject
) -> None:
    branches = branches_of(recording.calls)
    trained = Counter((p.uid, p.answer) for b in branches for p in b.calls if p.trained)
    assert trained == Counter((c.uid, i) for c in recording.calls for i in range(len(c.answers)))
    for branch in branches:
        spans = np.zeros(len(branch.tokens), np.bool_)
        for place in branch.calls:
            answer = recording.sequences.by_uid[place.uid].call.answers[place.answer]
            if place.trained:
                spans[place.start : place.stop] = True
                assert same(branch.logprobs[place.start : place.stop], answer.logprobs)
                assert (branch.versions[place.start : place.stop] == answer.spans[0].version).all()
        assert same(branch.loss_mask, spans)
        assert not branch.logprobs[~spans].any()
        assert (branch.versions[~spans] == -1).all()
        for place in branch.calls:
            assert same(branch.tokens[: place.stop], recording.whole(place.uid, place.answer))
        assert branch.calls[-1].stop == branch.turns[-1].stop == len(branch.tokens)
    calls = list(recording.calls)
    for call in recording.calls:
        if data.draw(st.booleans()):
            retry = replace(
                call, uid=f"{call.uid}-again", answers=(CallAnswer(tokens=tokens(9), logprobs=-np.ones(1, "<f4")),)
            )
            calls.insert(data.draw(st.integers(calls.index(call) + 1, len(calls))), retry)
    assert as_written(branches_of(calls)) == as_written(branches)
    assert [c.uid for c in distinct(calls)] == [c.uid for c in recording.calls]


def test_records_give_back_the_messages_they_were_made_from() -> None:
    question = {"role": "user", "content": "so?"}
    histories = [
        [question],
        [question, {"role": "assistant", "content": "hm"}, question],
        [{**question, "content": ""}],
    ]
    recording = Recording()
    for number, history in enumerate(histories):
        recording.call(tokens(number), tokens(1), messages=history)
        assert list(recording.sequences.by_uid[f"c{number}"].messages) == history
    assert json.loads(recording.calls[1].messages) == histories[1][1:]
