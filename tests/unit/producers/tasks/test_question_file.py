"""Questions of a JSON-lines file: read with their lines' numbers, compared as the options say."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollstream.producers.tasks.question_file import QuestionFile
from rollstream.topics.errors import ConfigurationError


def questions(tmp_path: Path, *lines: dict[str, Any] | str, **options: Any) -> QuestionFile:
    path = tmp_path / "capitals.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return QuestionFile(str(path), **options)


def test_lines_become_prompts_named_by_their_number_and_every_fifth_is_held_out(tmp_path: Path) -> None:
    lines = [{"q": f"{n}+1=", "a": n + 1} for n in range(10)]
    task = questions(tmp_path, *lines, "", question="q", answer="a", prompt="Q: {question}", stop=["\n"])
    train, heldout = task.prompts("train"), task.prompts("heldout")
    assert (task.name, task.stop, len(train), len(heldout)) == ("capitals", ("\n",), 8, 2)
    by_name = {prompt.example_id: prompt for prompt in (*train, *heldout)}
    assert (by_name["3"].text, by_name["3"].answer) == ("Q: 2+1=", "3")
    assert task.warm_start_examples(0, 5) == []


@pytest.mark.parametrize(
    ("match", "answer", "response", "right"),
    [
        ("text", "Paris", " paris\n", True),
        ("text", "Paris", "Paris!", False),
        ("exact", "Paris", "paris", False),
        ("exact", "Paris", "Paris", True),
        ("contains", "Paris", "It is PARIS, I think.", True),
        ("contains", "Paris", "It is Lyon.", False),
        ("number", "1200", "12 hundred, so 1,200.0", True),
        ("number", "7", "none", False),
    ],
)
def test_responses_are_compared_as_asked(tmp_path: Path, match: Any, answer: str, response: str, right: bool) -> None:
    task = questions(tmp_path, {"question": "?", "answer": answer}, match=match)
    [prompt] = [*task.prompts("train"), *task.prompts("heldout")]
    assert task.score(prompt, response, truncated=False).reward == float(right)
    assert task.score(prompt, response, truncated=True).reward == 0.0


def test_a_pattern_takes_the_last_answer_out_of_a_response(tmp_path: Path) -> None:
    task = questions(tmp_path, {"question": "?", "answer": "4"}, answer_pattern=r"<answer>(.*?)</answer>")
    [prompt] = task.prompts("heldout")
    assert task.score(prompt, "<answer>3</answer> no: <answer>4</answer>", truncated=False).reward == 1.0
    assert task.score(prompt, "4", truncated=False).reward == 0.0


@pytest.mark.parametrize(
    ("pattern", "response"),
    [
        ("answer: (.*)", "answer: 4\nDone."),
        ("answer: (.*)", "answer: 3\nNo, answer: 4"),
        ("(?s)<answer>(.*?)</answer>", "<answer>\n4\n</answer>"),
    ],
)
def test_a_pattern_ends_with_its_line_unless_it_says_otherwise(tmp_path: Path, pattern: str, response: str) -> None:
    task = questions(tmp_path, {"question": "?", "answer": "4"}, answer_pattern=pattern)
    [prompt] = task.prompts("heldout")
    assert task.score(prompt, response, truncated=False).reward == 1.0


@pytest.mark.parametrize(
    ("line", "options", "message"),
    [
        ("{", {}, "capitals.jsonl, line 1: not a JSON object with 'question' and 'answer'"),
        ('["a"]', {}, "line 1: not a JSON object"),
        ('{"question": "a"}', {}, "line 1"),
        ('{"question": "a", "answer": "b"}', {"match": "number"}, "line 1: its answer 'b' is not a number"),
        ('{"question": "a", "answer": "b"}', {"match": "alike"}, "not one of exact, text, number, contains"),
        ('{"question": "a", "answer": "b"}', {"prompt": "?"}, "no place for {question}"),
        ('{"question": "a", "answer": "b"}', {"answer_pattern": "("}, "not a regular expression"),
        ('{"question": "a", "answer": "b"}', {"answer_pattern": "a"}, "has no group"),
        ('{"question": "a", "answer": "b"}', {"heldout": "missing.jsonl"}, "cannot read the questions of missing"),
    ],
)
def test_what_is_no_question_is_refused_with_its_line(
    tmp_path: Path, line: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        questions(tmp_path, line, **options)


def test_a_held_out_answer_that_is_no_number_is_refused_with_its_line(tmp_path: Path) -> None:
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text('{"question": "1+1", "answer": "2"}\n{"question": "1+2", "answer": "three"}')
    with pytest.raises(ConfigurationError, match=r"heldout.jsonl, line 2: its answer 'three' is not a number"):
        questions(tmp_path, {"question": "1", "answer": "1"}, match="number", heldout=str(heldout))


def test_a_null_is_no_answer_and_a_byte_order_mark_no_text(tmp_path: Path) -> None:
    marked = questions(tmp_path, "\ufeff" + json.dumps({"question": "?", "answer": "4"}))
    assert [prompt.text for prompt in marked.prompts("heldout")] == ["?"]
    for fields in ({"question": "?", "answer": None}, {"question": None, "answer": "4"}):
        with pytest.raises(ConfigurationError, match=r"line 1: not a JSON object with 'question' and 'answer'"):
            questions(tmp_path, fields)
