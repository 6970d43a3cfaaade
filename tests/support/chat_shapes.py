"""Chat templates in the shapes of published ones, and what transformers renders with them.

`python -m tests.support.chat_shapes` records its renderings (it needs the requirements of the long form).
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

RECORDED = Path(__file__).parents[1] / "fixtures" / "transformers-chats.json"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "cls_token": "<cls>"}


class Shape(NamedTuple):
    """A template, and the form in which it takes what OpenAI's protocol leaves open."""

    source: str
    for_tools: str = ""
    """The template for requests with tools, if there is another one."""
    arguments_as_text: bool = False
    keeps_null: bool = False
    """Whether it was written before transformers 5, which leaves out null content before it renders."""
    variables: Mapping[str, Any] = MappingProxyType({})


_LOOP = "{% for m in messages %}"
_CALLS = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
_DEEPSEEK = """\
{%- if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- set ns = namespace(is_first=true, system='') %}
{%- for message in messages %}
{%- if message['role'] == 'system' %}{% set ns.system = message['content'] %}{% endif %}{% endfor %}
{{- bos_token }}{{ ns.system }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{{ '<|User|>' + message['content'] }}{% endif %}
{%- if message['role'] == 'assistant' and message['content'] is none %}
{%- for tool in message['tool_calls'] %}
{{- '<|call|>' + tool['type'] + '<|sep|>' + tool['function']['name'] + '\\n```json\\n' }}
{{- tool['function']['arguments'] + '\\n```' }}
{%- endfor %}<|end|>
{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is not none %}
{{- '<|Assistant|>' + message['content'] + '<|end|>' }}{% endif %}
{%- if message['role'] == 'tool' %}{{ '<|output|>' + message['content'] }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|Assistant|>{% endif %}"""
_QWEN3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools' }}
    {%- for tool in tools %}
        {{- '\\n' }}{{ tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == 'user' and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content is string and loop.index0 > ns.last_query_index %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
_LLAMA = """\
{{- bos_token }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set date_string = date_string if date_string is defined else strftime_now("100 %%") %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|system|>\\nToday: " + date_string + "\\n" }}
{%- if tools is not none %}{%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}{%- endif %}
{{- system_message }}<|eot|>
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|' + message['role'] + '|>\\n' + message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception("One call at a time!") }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|assistant|>\\n{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}{{- "}<|eot|>" }}
    {%- else %}
        {{- "<|ipython|>\\n" }}
        {%- if message.content is mapping or message.content is not string %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}{{- "<|eot|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}"""
_GLM = """\
[gMASK]<sop>
{%- macro visible(content) -%}
    {%- if content is string -%}{{ content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for item in content -%}{%- if item is string -%}{{ item }}{%- endif -%}{%- endfor -%}
    {%- else -%}{{ content }}{%- endif -%}
{%- endmacro -%}
{%- for m in messages %}
{%- if m.role == 'system' and loop.index > 1 %}{% continue %}{% endif %}
{%- if m.role == 'stop' %}{% break %}{% endif %}
<|{{ m.role }}|>
{{ visible(m.content) }}
{%- if m.tool_calls %}{%- for tc in m.tool_calls %}
<tool_call>{{ tc.function.name }}
{%- for k, v in tc.function.arguments.items() %}
<arg_key>{{ k }}</arg_key><arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{%- endfor %}</tool_call>{%- endfor %}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
{{- '\\n<think></think>' if enable_thinking is defined and not enable_thinking else '' }}{% endif %}"""
SHAPES: dict[str, Shape] = {
    "chatml": Shape(
        _LOOP + "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "qwen3": Shape(_QWEN3),
    "qwen3, thinking off": Shape(_QWEN3, variables={"enable_thinking": False}),
    "llama 3": Shape(_LLAMA),
    "llama 3, another day": Shape(_LLAMA, variables={"date_string": "1 May"}),
    "deepseek": Shape(_DEEPSEEK, arguments_as_text=True, keeps_null=True),
    "glm": Shape(_GLM, variables={"enable_thinking": False}),
    "mistral": Shape(
        "{{ bos_token }}{% if tools %}[TOOLS]{{ tools | tojson(separators=(',', ':')) }}[/TOOLS]{% endif %}" + _LOOP +
        "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}[R]{{ {'content': m.content, "
        "'call_id': m.tool_call_id} | tojson(separators=(', ', '=')) }}[/R]{% elif m.tool_calls is defined %}[CALLS]"
        "{% for c in m.tool_calls %}{{ (c.function | tojson)[:-1] + ', \"id\": \"' + c.id + '\"}' }}{% endfor %}"
        "{{ eos_token }}{% elif m.role == 'assistant' %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
    ),
    "gemma": Shape(
        "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}" + _LOOP + "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles') }}"
        "{% endif %}<start>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end>\n"
        "{% endfor %}\n{% if add_generation_prompt %}<start>model\n{% endif %}"
    ),
    "sorted": Shape(
        _LOOP + "{{ m.role }}: {{ m.content }}" + _CALLS + "{{ f.arguments | tojson(sort_keys=true, ensure_ascii=true)"
        " }}{{ f.arguments | tojson(false, 1) }}{% endfor %}{{ '<>&' | tojson }}\n{% endfor %}"
    ),
    "joined": Shape(
        _LOOP + "{{ m.role ~ ': ' ~ m.content }}" + _CALLS + "{{ f.name ~ '(' ~ f.arguments ~ ')' }}{{ f.arguments }}"
        "{{ f.arguments + '!' }}{{ f.arguments | string | trim }}{% endfor %}\n{% endfor %}", arguments_as_text=True
    ),
    "smol": Shape(
        _LOOP + "    {% if m.role == 'assistant' %}\n<|a|>{% generation %}{% set inner = 'x' %}{{ m.content }}"
        "{{ loop.index }}</a>{% endgeneration %}\n    {% else %}\n<|{{ m.role }}|>{{ m.content }}{{ inner }}\n"
        "    {% endif %}\n{% endfor %}"
    ),
    "harmony": Shape(
        _LOOP + "{% if m.thinking %}<|analysis|>{{ m.thinking }}{% endif %}{% if m.reasoning_content is defined %}"
        "<r>{% endif %}{% if 'content' in m %}<|final|>{{ m.content }}{% endif %}{% for c in m.tool_calls or [] %}"
        "<|commentary to={{ c.function.name }}|>{{ c.function.arguments | tojson }}{% endfor %}\n{% endfor %}"
        "{{ pad_token }}{{ cls_token }}{{ sep_token }}{% if documents is none %}no documents{% endif %}"
    ),
    "one for tools": Shape(
        "plain" + _LOOP + "{{ m.content }}{% endfor %}",
        "tools{{ tools | length }}" + _LOOP + "{{ m.content }}{% endfor %}"
    ),
}  # fmt: skip
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "füge", "description": "<b> & 'c'", "parameters": {"type": "object"}}}
]
_CALL = {"name": "füge", "arguments": '{"z":"ü","a": [1, 2.5, null]}'}
_ASKED = [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": "20+22? <é>"}]
_CALLED = {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": _CALL}]}
_RESULT = {"role": "tool", "tool_call_id": "c1", "content": "42"}
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "a question": (_ASKED[1:], []),
    "a system message": (_ASKED, []),
    "two turns": ([*_ASKED[1:], {"role": "assistant", "content": "42", "name": None}, _ASKED[1]], []),
    "a call": ([*_ASKED, _CALLED, _RESULT], TOOLS),
    "a call with reasoning": ([_ASKED[1], {**_CALLED, "content": "I add.", "reasoning": "hm\n"}, _RESULT], TOOLS),
}


def rendered_by_transformers(shape: Shape, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str | None:
    """Return what transformers renders; None if it refuses the conversation."""
    import jinja2
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from transformers.utils.chat_template_utils import render_jinja_template

    shown = json.loads(json.dumps(messages))
    if not shape.arguments_as_text:
        for call in (call for message in shown for call in message.get("tool_calls") or ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **TOKENS)
    source = {"default": shape.source, "tool_use": shape.for_tools} if shape.for_tools else shape.source
    tokenizer.chat_template = source
    try:
        if shape.keeps_null:
            assert isinstance(source, str)
            [text], _ = render_jinja_template(
                [shown], tools=tools or None, chat_template=source, add_generation_prompt=True, **TOKENS
            )
        else:
            text = tokenizer.apply_chat_template(
                shown, tools=tools or None, add_generation_prompt=True, tokenize=False, **shape.variables
            )
    except jinja2.UndefinedError:
        # A template that joins the content of every message with text fails for null; we render it as empty.
        filled = [{**message, "content": message["content"] or ""} for message in messages]
        return None if filled == messages else rendered_by_transformers(shape, filled, tools)
    except jinja2.TemplateError:
        return None
    return str(text)


def recorded() -> dict[str, dict[str, str | None]]:
    """Return the recorded renderings by shape and conversation."""
    renderings: dict[str, dict[str, str | None]] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return renderings


def main() -> int:
    """Record every shape with every conversation."""
    renderings = {
        name: {title: rendered_by_transformers(shape, *chat) for title, chat in CONVERSATIONS.items()}
        for name, shape in SHAPES.items()
    }
    RECORDED.write_text(json.dumps(renderings, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(f"{RECORDED}: {RECORDED.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
