"""Codes of what learners skip: a field, which is derived from the text in records of earlier releases."""

from dataclasses import replace

import pytest

from rollstream.consumers.buffers.rollouts.shelf import ShelfRules
from rollstream.topics.codec import decode, encode
from rollstream.topics.records import BatchUse, LearnerStep
from rollstream.topics.skip_reasons import EXCLUDED, ROW_CODES, code_of

LONG = "n" * 290
STEP = LearnerStep(
    learner="l", step=1, input_run="r", uses=(), position=1, policy_version=-1, params_digest="", trained_total=0,
    skipped_total=8,
)  # fmt: skip


def step_with(reason: str, code: str) -> LearnerStep:
    use = BatchUse(batch_id="0-0", index_offset=0, rows=8, use="skipped", reason=reason, code=code)
    return replace(STEP, uses=(use,))


WORDS = [
    *((f"left out as {code}: longer than {LONG}", code) for code in ROW_CODES),
    (f"excluded: worker {LONG}", EXCLUDED),
    ("policy version 7 is not on record", "unknown_version"),
    ("policy version 7 is 9 steps old, max_policy_lag is 2", "stale_version"),
    ("weight step 4 is ahead of step 2", "ahead"),
    ("weight step -1 is 4 steps old, at most 2 may be", "old_step"),
    ("3600 s old or more", "too_old"),
    ("4096 newer ones fill the buffer", "capacity"),
    ("drawn 2 times", "used_up"),
    ("of no interest", ""),
]


@pytest.mark.parametrize(("reason", "code"), WORDS)
def test_words_tell_the_code(reason: str, code: str) -> None:
    assert code_of(reason) == code


@pytest.mark.parametrize(("weight_step", "timestamp"), [(9, 0.0), (1, 0.0), (4, -1e6)])
def test_words_of_a_buffer_tell_the_code_it_gives(weight_step: int, timestamp: float) -> None:
    rules, place = ShelfRules(), (weight_step, timestamp, 4, 0.0)
    assert code_of(rules.stale(*place)) == rules.stale_code(*place) != ""


@pytest.mark.parametrize("code", ["too_long", ""])
def test_a_code_on_record_is_what_counts_whatever_the_words_say(code: str) -> None:
    step = step_with(f"excluded: {LONG}", code)
    assert decode(encode(step)) == step
    assert code_of(step.uses[0].reason) == EXCLUDED
