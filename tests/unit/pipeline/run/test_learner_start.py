"""A file of examples becomes tokens and masks in its order; whatever is wrong with one is named by its line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollstream.consumers.models.tokenizer import CharacterTokenizer
from rollstream.pipeline.config import RunConfig, load
from rollstream.pipeline.run.learner_start import examples_from, warm_start_examples
from rollstream.topics.errors import ConfigurationError

TOKENIZER = CharacterTokenizer()
GOOD = {"prompt": "429>", "answer": "249"}


def written(path: Path, *lines: Any) -> Path:
    text = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(text) + b"\n")
    return path


def test_text_and_tokens_become_tokens_and_masks(tmp_path: Path) -> None:
    path = written(
        tmp_path / "x.jsonl", GOOD, b"  ", {"tokens": [5, 6, 7], "loss_mask": [0, 0, 1], "note": "x"}, {**GOOD, "id": 1}
    )
    text, tokens, again = examples_from(path, TOKENIZER, TOKENIZER.vocab_size)
    assert TOKENIZER.decode(text[0]) == "429>249"
    assert text[0][-1] == TOKENIZER.eos_id
    assert text[1].tolist() == [False] * 4 + [True] * 4
    assert (text[0].dtype, text[1].dtype) == (np.int32, np.bool_)
    assert (tokens[0].tolist(), tokens[1].tolist()) == ([5, 6, 7], [False, False, True])
    assert np.array_equal(again[0], text[0])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "4', "not JSON"),
        (b'{"prompt": "\xff"}', "not JSON"),
        ([1, 2], "a JSON list instead of an object"),
        ({"prompt": "4"}, 'answer is None; give "prompt" and "answer", or "tokens" and "loss_mask"'),
        ({"prompt": 4, "answer": "4"}, "prompt is 4"),
        ({"prompt": "é", "answer": "4"}, "character 'é' of 'é' is not in the tokenizer's vocabulary"),
        ({"tokens": [1, 2]}, "loss_mask is not a list of whole numbers"),
        ({"tokens": [1, 2], "loss_mask": [0]}, "loss_mask has 1 entries for 2 tokens"),
        ({"tokens": [1, 98], "loss_mask": [0, 1]}, "tokens contains 98, which is not between 0 and 97"),
        ({"tokens": [1, 2], "loss_mask": [0, 2]}, "loss_mask contains 2, which is not between 0 and 1"),
        ({"tokens": [1.5], "loss_mask": [1]}, "tokens is not a list of whole numbers"),
        ({"tokens": [1, 2], "loss_mask": [1, 0]}, "no token is trained"),
        ({"tokens": [], "loss_mask": []}, "no token is trained"),
        ({"prompt": "", "answer": ""}, "no token is trained"),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path: Path, line: Any, message: str) -> None:
    path = written(tmp_path / "x.jsonl", GOOD, line)
    with pytest.raises(ConfigurationError) as refused:
        examples_from(path, TOKENIZER, 98)
    assert str(refused.value).startswith(f"{path}, line 2: {message}")


def test_text_beyond_the_models_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"line 1: token \d+ is beyond the model's vocabulary of 5"):
        examples_from(written(tmp_path / "x.jsonl", GOOD), TOKENIZER, 5)


def test_a_file_that_is_missing_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        examples_from(tmp_path / "none.jsonl", TOKENIZER, 98)
    with pytest.raises(ConfigurationError, match="holds no example"):
        examples_from(written(tmp_path / "x.jsonl", b" "), TOKENIZER, 98)


def test_the_settings_say_whose_examples_are_taken(tmp_path: Path) -> None:
    config = RunConfig()
    assert len(warm_start_examples(config)) == 2048
    path = written(tmp_path / "x.jsonl", GOOD)
    learner = replace(config.learner, warm_start=replace(config.learner.warm_start, file=str(path)))
    assert len(warm_start_examples(replace(config, learner=learner))) == 1
    assert load(flags=[f"learner.warm_start.file={path}"]).learner.warm_start.file == str(path)
