"""Chat templates over a tokenizer of Qwen's kind: the library's renderer, a template in Jinja, and the plain one."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollstream.consumers.models.tokenizer import CharacterTokenizer
from rollstream.consumers.models.tokenizer_file import TokenizerFile, load_tokenizer
from rollstream.producers.inference.chat import hermes
from rollstream.producers.inference.chat.conversations import ConversationMemory
from rollstream.producers.inference.chat.jinja_template import JinjaTemplate
from rollstream.producers.inference.chat.selection import chat_template
from rollstream.producers.inference.chat.template import (
    ChatTemplate,
    Message,
    SampledTurn,
    TemplateRefused,
    Tool,
    call_object,
)
from rollstream.producers.inference.dialects.chat_completions import ChatCompletions, parse_messages
from rollstream.producers.inference.dialects.sampled_choices import SampledChoice, held_back
from rollstream.producers.inference.dialects.sampling_parameters import RequestLimits
from rollstream.topics.errors import ConfigurationError, RollstreamError
from tests.support import chat_shapes
from tests.support.checkpoints import CHAT_TOKENS, write_tokenizer

QWEN = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role != 'system' %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}

<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TOOLS: list[Tool] = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {}}}]
SYSTEM: Message = {"role": "system", "content": "Be brief."}
USER: Message = {"role": "user", "content": "What is 20+22?"}
ANSWER = 'I add.\n<tool_call>\n{"name":  "add", "arguments": {"a": 20}}\n</tool_call><|im_end|>'
CALLED: Message = {"role": "assistant", "content": "I add.", "tool_calls": [call_object("add", '{"a": 20}', "call_0")]}
RESULT: Message = {"role": "tool", "content": "42", "tool_call_id": "call_0"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that merges texts of templates, so that text that is rendered again has other tokens."""
    directory = tmp_path_factory.mktemp("checkpoint")
    corpus = [QWEN, ANSWER, "user\nassistant\nsystem\n"] * 20
    write_tokenizer(directory, corpus, size=420, special_tokens=CHAT_TOKENS)
    config = {"chat_template": QWEN, "eos_token": {"content": "<|im_end|>"}}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> TokenizerFile:
    return load_tokenizer(checkpoint)


@pytest.fixture(params=["", "qwen3", "plain"])
def template(request: pytest.FixtureRequest, checkpoint: Path, tokenizer: TokenizerFile) -> ChatTemplate:
    return chat_template(request.param, tokenizer, str(checkpoint))


def test_a_conversation_is_continued_from_its_tokens(template: ChatTemplate, tokenizer: TokenizerFile) -> None:
    sampled = tokenizer.encode(ANSWER)
    turn = SampledTurn(template.render([SYSTEM, USER], TOOLS), sampled)
    messages = [SYSTEM, USER, CALLED, RESULT]
    continued = template.extend(turn, messages, 3, TOOLS)
    assert continued is not None
    known = [*turn.prompt, *sampled]
    assert continued[: len(known)] == known
    # The new part is what a whole rendering adds; only the answer differs from what was sampled.
    rendered = template.render(messages, TOOLS)
    rest = tokenizer.decode(continued[len(known) :])
    assert "42" in rest
    assert "I add" not in rest
    assert tokenizer.decode(rendered).endswith(rest.lstrip("\n"))
    assert rendered != continued


def test_an_answer_cut_off_is_closed_in_the_next_prompt(template: ChatTemplate, tokenizer: TokenizerFile) -> None:
    sampled = tokenizer.encode("I ad")
    turn = SampledTurn(template.render([USER], ()), sampled)
    messages = [USER, {"role": "assistant", "content": "I ad"}, {"role": "user", "content": "Go on."}]
    continued = template.extend(turn, messages, 2, ())
    assert continued is not None
    known = [*turn.prompt, *sampled]
    assert continued[: len(known)] == known
    assert continued[len(known)] == tokenizer.token_id("<|im_end|>")


def test_the_first_prompt_is_what_the_template_writes(checkpoint: Path, tokenizer: TokenizerFile) -> None:
    text = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 20+22?<|im_end|>\n<|im_start|>assistant\n"
    )
    for name in ("", "qwen3"):
        assert chat_template(name, tokenizer, str(checkpoint)).render([SYSTEM, USER], ()) == tokenizer.encode(text)


def test_calls_and_reasoning_are_read_from_the_tokens(checkpoint: Path, tokenizer: TokenizerFile) -> None:
    for name in ("", "qwen3"):
        template = chat_template(name, tokenizer, str(checkpoint))
        prompt = template.render([USER], TOOLS)
        message = template.parse(SampledTurn(prompt, tokenizer.encode(f"<think>\nhm\n</think>\n\n{ANSWER}")))
        assert message.reasoning == "hm"
        assert message.content.strip() == "I add."
        [call] = message.tool_calls
        assert (call.name, json.loads(call.arguments)) == ("add", {"a": 20})
        broken = template.parse(SampledTurn(prompt, tokenizer.encode('<tool_call>{"name": </tool_call><|im_end|>')))
        assert broken.tool_calls == ()
        assert '{"name":' in broken.content


@pytest.mark.parametrize(
    "answer",
    [ANSWER, "No tools.<|im_end|>", "<think>\nhm\n</think>\n\nYes <b>.<|im_end|>", "<tool_call>{broken<|im_end|>"],
)
def test_an_incomplete_answer_shows_what_later_tokens_do_not_change(
    template: ChatTemplate, tokenizer: TokenizerFile, answer: str
) -> None:
    sampled = tokenizer.encode(answer)
    prompt = template.render([USER], TOOLS)
    whole = template.parse(SampledTurn(prompt, sampled))
    for length in range(len(sampled) + 1):
        message = template.parse(SampledTurn(prompt, sampled[:length]), complete=False)
        assert whole.content.startswith(held_back(message.content, template.markers))
        assert whole.reasoning.startswith(held_back(message.reasoning, template.markers))


def test_a_template_that_rewrites_the_past_is_not_continued(
    checkpoint: Path, tokenizer: TokenizerFile, tmp_path: Path
) -> None:
    file = tmp_path / "last.jinja"
    file.write_text("{% for m in messages %}{{ m.content if loop.last else '...' }}<|im_end|>{% endfor %}")
    template = chat_template(str(file), tokenizer, str(checkpoint))
    messages: Sequence[Message] = [USER, {"role": "assistant", "content": "4"}, USER]
    assert template.extend(SampledTurn(template.render([USER], ()), [5, 6]), messages, 2, ()) is None


def test_a_template_may_refuse_a_conversation(tokenizer: TokenizerFile, tmp_path: Path) -> None:
    file = tmp_path / "refuses.jinja"
    file.write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RollstreamError, match="roles must alternate"):
        chat_template(str(file), tokenizer, "").render([USER], ())


@pytest.mark.parametrize(
    ("setting", "message"),
    [("qwen33", "qwen33"), ("no.jinja", "cannot be read"), ("llama-3", "llama-3")],
)
def test_a_template_that_cannot_be_had_is_one_line_with_the_setting(
    tokenizer: TokenizerFile, setting: str, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        chat_template(setting, tokenizer, "")


def test_a_renderer_of_the_library_needs_a_tokenizer_of_a_checkpoint() -> None:
    with pytest.raises(ConfigurationError, match=r"learner\.pretrained"):
        chat_template("qwen3", CharacterTokenizer(), "")


def test_half_of_a_surrogate_pair_in_a_call_stays_escaped() -> None:
    written = r'<tool_call>{"name": "f", "arguments": {"a": "é \ud83d"}}</tool_call>'
    [call] = hermes.parse(written).tool_calls
    assert hermes.call_text(call.name, call.arguments) == written


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity"])
def test_a_call_with_a_number_that_json_cannot_hold_is_text(number: str) -> None:
    written = f'<tool_call>{{"name": "f", "arguments": {{"a": {number}}}}}</tool_call>'
    message = hermes.parse(written)
    assert (message.tool_calls, message.content) == ((), written)


class Letters(CharacterTokenizer):
    """A tokenizer whose tokens are all characters of Unicode, so that a prompt is its text."""

    eos_ids = (0,)

    def encode(self, text: str) -> list[int]:
        return list(map(ord, text))


def rendered(shape: chat_shapes.Shape, messages: list[Message], tools: list[Tool]) -> str | None:
    sources = {"default": shape.source, **({"tool_use": shape.for_tools} if shape.for_tools else {})}
    template = JinjaTemplate(Letters(), sources, chat_shapes.TOKENS).with_variables(shape.variables)
    try:
        return "".join(map(chr, template.render(parse_messages(messages), tools)))
    except TemplateRefused:
        return None


@pytest.mark.parametrize("name", chat_shapes.SHAPES)
def test_published_templates_render_as_recorded_from_transformers(name: str) -> None:
    shape = chat_shapes.SHAPES[name]
    actual = {title: rendered(shape, *chat) for title, chat in chat_shapes.CONVERSATIONS.items()}
    assert actual == chat_shapes.recorded()[name]


@pytest.mark.long
@pytest.mark.parametrize("name", chat_shapes.SHAPES)
def test_what_is_recorded_from_transformers_is_what_it_renders(name: str) -> None:
    shape = chat_shapes.SHAPES[name]
    actual = {t: chat_shapes.rendered_by_transformers(shape, *chat) for t, chat in chat_shapes.CONVERSATIONS.items()}
    assert actual == chat_shapes.recorded()[name]


def test_an_answer_with_an_empty_text_beside_its_calls_is_one_with_null() -> None:
    chat = chat_shapes.CONVERSATIONS["a call"]
    messages = [{**message, "content": message["content"] or ""} for message in chat[0]]
    assert rendered(chat_shapes.SHAPES["deepseek"], messages, chat[1]) == chat_shapes.recorded()["deepseek"]["a call"]


def test_a_variable_of_the_setting_gives_way_to_that_of_a_request(tokenizer: TokenizerFile, tmp_path: Path) -> None:
    file = tmp_path / "day.jinja"
    file.write_text("{{ day }}")
    template = chat_template(str(file), tokenizer, "", {"day": "Monday"})
    assert tokenizer.decode(template.render([USER], ())) == "Monday"
    assert tokenizer.decode(template.with_variables({"day": "May"}).render([USER], ())) == "May"
    thinking = chat_template("qwen3", tokenizer, "").render([USER], ())
    without = chat_template("qwen3", tokenizer, "", {"enable_thinking": False}).render([USER], ())
    assert without == [*thinking, *tokenizer.encode("<think>\n\n</think>\n\n")]


@pytest.mark.parametrize(
    ("setting", "variables", "message"),
    [
        ("plain", {"enable_thinking": False}, "no variable enable_thinking"),
        ("qwen3", {"enable_thinkin": False}, "enable_thinkin"),
        ("", {"messages": []}, "messages is no variable"),
    ],
)
def test_a_variable_that_a_template_cannot_have_is_refused_by_name(
    tokenizer: TokenizerFile, checkpoint: Path, setting: str, variables: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=rf"inference\.chat_template_kwargs: .*{message}"):
        chat_template(setting, tokenizer, str(checkpoint), variables)


def test_the_files_of_a_checkpoint_win_over_the_templates_in_its_configuration(
    checkpoint: Path, tokenizer: TokenizerFile, tmp_path: Path
) -> None:
    named = [{"name": "default", "template": "old"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))

    def texts() -> list[str]:
        template = chat_template("", tokenizer, str(tmp_path))
        return [tokenizer.decode(template.render([USER], tools)) for tools in ([], TOOLS)]

    assert texts() == ["old", "tools"]
    (tmp_path / "chat_template.jinja").write_text("new")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("new tools")
    assert texts() == ["new", "new tools"]


def test_a_conversation_is_continued_only_under_the_same_variables_of_the_template() -> None:
    source = "{{ mood }}{% for m in messages %}{{ m.content }}\0{% endfor %}"
    limits = RequestLimits(max_model_len=100, max_rows=1, vocab_size=0x110000, truncated_sampling=False)
    template = JinjaTemplate(Letters(), {"default": source}, {})
    dialect = ChatCompletions(Letters(), limits, template, ConversationMemory(1000))

    def prompt(*texts: str, mood: str | None) -> str:
        roles = ("user", "assistant", "user")
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
        variables = None if mood is None else {"mood": mood}
        request = dialect.parse({"messages": messages, "chat_template_kwargs": variables}, "")
        [tokens] = request.sampling.prompts
        if len(texts) == 1:  # its tokens are not those of its text
            choice = SampledChoice(
                index=0, prompt=tokens, tokens=[*map(ord, "forty-two"), 0], logprobs=[-1.0] * 10, text="42",
                finish_reason="stop", stop_reason=None, versions=(),
            )  # fmt: skip
            dialect.remember(request, choice)
        return "".join(map(chr, tokens))

    assert prompt("ask", mood="calm ") == "calm ask\0"
    assert prompt("ask", "42", "on", mood="calm ") == "calm ask\0forty-two\0on\0"
    assert prompt("ask", "42", "on", mood="wild ") == "wild ask\x0042\0on\0"
    assert prompt("ask", "42", "on", mood=None) == "ask\x0042\0on\0"
