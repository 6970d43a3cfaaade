"""A rollout is shown in full, also one that grouping refused because its arrays are invalid."""

import io
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from rollstream.consumers.grouping.testing import example_rollout
from rollstream.pipeline.tools import show
from rollstream.topics.records import Rollout

VALID = example_rollout("valid", 1.0, tokens=np.array([1, 2, 3, 4], "<i4"))
INVALID = {
    "a log-probability of NaN": replace(VALID, logprobs=np.array([0, 0, np.nan, -0.5], "<f4")),
    "too few log-probabilities": replace(VALID, logprobs=VALID.logprobs[:3]),
    "a mask that is too short": replace(VALID, loss_mask=VALID.loss_mask[:3]),
}


@pytest.mark.parametrize("rollout", INVALID.values(), ids=INVALID)
@pytest.mark.parametrize("advantage", [None, 0.5])
def test_an_invalid_rollout_is_shown_as_far_as_it_makes_sense(rollout: Rollout, advantage: float | None) -> None:
    tokens = show.tokens_table(rollout, advantage, None)
    console = Console(file=io.StringIO(), width=100)
    console.print(tokens)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().split()[:4] == ["1", "2", "3", "4"]


def test_each_token_has_its_text_below_its_id() -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(show.tokens_table(VALID, None, None, ["a b", "\x1b", "tokenization", ""]))
    assert isinstance(console.file, io.StringIO)
    _ids, texts, logprobs = console.file.getvalue().splitlines()[:3]
    assert [texts[at : at + 9] for at in range(0, 36, 9)] == ["     a·b ", "  \\u001b ", "tokeniza ", "         "]
    assert "-" in logprobs


def test_spaces_and_line_ends_are_visible_and_unlikely_tokens_are_listed() -> None:
    rollout = replace(VALID, logprobs=np.log(np.array([1, 0.001, 0.25, 0.02], "<f4")))
    assert list(rollout.loss_mask) == [False, False, True, True]
    texts = ["a", "b", " so\n", "\tbut"]
    assert show.unlikely_tokens(rollout, texts) == (
        "least likely: ab\u00b7so\u23ce[\u21e5but] at 3 (2.00%), ab[\u00b7so\u23ce] at 2 (25.00%)"
    )
    assert show.unlikely_tokens(rollout, texts, most=1).endswith("(2.00%)")
    assert show.unlikely_tokens(replace(rollout, logprobs=np.zeros(4, "<f4")), texts) == ""


def test_a_prompt_is_shown_as_its_text_unless_all_tokens_are_asked_for() -> None:
    mask = np.array([False] * 1500 + [True] * 9)
    long = replace(
        example_rollout("long", 1.0, tokens=np.arange(1509, dtype="<i4")),
        loss_mask=mask,
        logprobs=np.full(1509, -0.5, "<f4"),
    )
    texts = ["p"] * 1499 + [" ", *"answering"]
    short = str(show.tokens_table(long, None, 8, texts)).splitlines()
    assert short[0] == f"0 to 1499, not sampled: {'p' * 600} ... {'p' * 599}\u00b7"
    assert short[1].split() == [str(i) for i in range(1500, 1508)]
    assert short[2].split() == list("answerin")
    assert short[4] == "... 1 more tokens; --full shows them"
    assert str(show.tokens_table(long, None, None, texts)).split()[:2] == ["0", "1"]
