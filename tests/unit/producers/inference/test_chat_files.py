"""Chats in JSON lines become rollouts that a policy could have sampled, and a line that does not is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollstream.consumers.models.tokenizer_file import TokenizerFile, load_tokenizer
from rollstream.producers.inference.chat.selection import chat_template
from rollstream.producers.inference.chat.template import ChatTemplate
from rollstream.producers.inference.chat_files import ChatRollouts, chat_identity, chat_rollouts
from rollstream.topics.wire.rollout_batch_upcast import PLACE
from tests.support.checkpoints import CHAT_TOKENS, write_tokenizer

TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content and loop.last %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""As Qwen3's: reasoning is left out of an answer once another message follows it."""
USER = {"role": "user", "content": "What is 20+22?"}
ANSWER = {"role": "assistant", "content": "It is 42."}
THANKS = {"role": "user", "content": "And 2?"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TokenizerFile:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, ["user\nassistant\nWhat is 20+22? It is 42."], special_tokens=CHAT_TOKENS)
    return load_tokenizer(directory)


@pytest.fixture
def template(tmp_path: Path, tokenizer: TokenizerFile) -> ChatTemplate:
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    return chat_template(str(tmp_path / "template.jinja"), tokenizer, "")


def made(path: Path, template: ChatTemplate, *lines: Any, vocab_size: int = 1000) -> list[ChatRollouts]:
    file = path / "chats.jsonl"
    file.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return list(chat_rollouts(file, chat_identity(file, file.name), template, vocab_size))


def trained(tokenizer: TokenizerFile, line: ChatRollouts) -> list[str]:
    """The texts of the spans of a line's rollout that are trained on, with special tokens."""
    [rollout] = line.rollouts
    spans, previous = [[]], False
    for token, mask in zip(rollout.tokens.tolist(), rollout.loss_mask.tolist(), strict=True):
        if mask and not previous:
            spans.append([])
        if mask:
            spans[-1].append(token)
        previous = mask
    return [tokenizer.decode(span) for span in spans[1:]]


def test_every_answer_of_a_conversation_is_trained_on_with_the_token_that_ends_it(
    tmp_path: Path, template: ChatTemplate, tokenizer: TokenizerFile
) -> None:
    messages = [USER, ANSWER, THANKS, {"role": "assistant", "content": "2."}, {"role": "user", "content": "Bye"}]
    [line] = made(tmp_path, template, {"messages": messages, "environment": "maths", "id": 7, "reward": 0.5})
    [rollout] = line.rollouts
    assert trained(tokenizer, line) == ["It is 42.", "2."]
    ends = [stop - 1 for turn in rollout.turns if turn.role == "assistant" for stop in [turn.stop]]
    assert all(rollout.tokens[end] in template.stop_ids and rollout.loss_mask[end] for end in ends)
    assert rollout.tokens.tolist() == [
        *template.render(messages[:3], []),
        *tokenizer.encode("2."),
        rollout.tokens[-1],
    ], "as a server prompts and a policy samples; what follows the last answer is left out"
    assert [(turn.role, turn.text) for turn in rollout.turns] == [(m["role"], m["content"]) for m in messages[:4]]
    assert (rollout.environment, rollout.example_id, rollout.reward) == ("maths", "7", 0.5)
    assert not rollout.logprobs.any()


def test_an_answer_that_is_rendered_otherwise_later_is_context_alone(
    tmp_path: Path, template: ChatTemplate, tokenizer: TokenizerFile
) -> None:
    thought = {**ANSWER, "reasoning_content": "20+22"}
    alone, followed = made(
        tmp_path, template, {"messages": [USER, thought]}, {"messages": [USER, thought, THANKS, ANSWER]}
    )
    assert len(trained(tokenizer, alone)) == 1
    assert "20+22" in trained(tokenizer, alone)[0]
    assert trained(tokenizer, followed) == ["It is 42."]


def test_texts_are_messages_and_a_pair_is_a_group_of_two(
    tmp_path: Path, template: ChatTemplate, tokenizer: TokenizerFile
) -> None:
    chat, completion, pair = made(
        tmp_path,
        template,
        {"messages": [USER, ANSWER]},
        {"prompt": USER["content"], "completion": ANSWER["content"]},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": "It is 41."},
    )
    assert completion.rollouts[0].tokens.tolist() == chat.rollouts[0].tokens.tolist()
    better, worse = pair.rollouts
    assert better.tokens.tolist() == chat.rollouts[0].tokens.tolist()
    assert tokenizer.decode(worse.response_tokens.tolist()) == "It is 41."
    assert (better.reward, worse.reward, better.group_size, worse.group_size) == (1.0, 0.0, 2, 2)
    assert better.group_id == worse.group_id == better.extra[PLACE] == pair.place
    assert better.uid != worse.uid


def test_the_same_file_makes_the_same_rollouts_and_another_line_another_digest(
    tmp_path: Path, template: ChatTemplate
) -> None:
    first, again = (made(tmp_path, template, "", {"messages": [USER, ANSWER]})[0] for _ in range(2))
    assert first.rollouts[0].uid == again.rollouts[0].uid == first.place
    assert first.place.startswith("chats.jsonl@")
    assert first.place.endswith(":2"), "empty lines are skipped, and counted"
    assert made(tmp_path, template, "", {"messages": [USER, ANSWER]}, "")[0].place != first.place


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[1]", "a JSON list instead of an object"),
        ({"text": "a"}, 'give "messages", or'),
        ({"messages": []}, "at least one message"),
        ({"messages": [USER]}, "no message is the assistant's"),
        ({"messages": [{"role": "robot", "content": ""}]}, "must be one of"),
        ({"messages": [USER, {"role": "assistant", "content": "a<|im_end|>b"}]}, "does not render the last answer"),
        ({"messages": [USER, {"role": "user", "content": [{"type": "image"}]}]}, "only parts of type text"),
        ({"messages": [USER, ANSWER], "reward": "high"}, "could not convert"),
        ({"messages": [USER, ANSWER], "reward": 1e300}, "reward is 1e+300"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are equal"),
    ],
)
def test_a_line_that_makes_no_rollout_is_named_with_its_reason_and_the_others_stay(
    tmp_path: Path, template: ChatTemplate, line: Any, reason: str
) -> None:
    lines = made(tmp_path, template, {"messages": [USER, ANSWER]}, line, {"messages": [USER, ANSWER]})
    assert [len(each.rollouts) for each in lines] == [1, 0, 1]
    assert reason in lines[1].reason
    assert lines[1].place.endswith(":2")


def test_a_token_beyond_the_vocabulary_of_the_model_is_refused(tmp_path: Path, template: ChatTemplate) -> None:
    [line] = made(tmp_path, template, {"messages": [USER, ANSWER]}, vocab_size=200)
    assert "beyond the model's vocabulary of 200" in line.reason
