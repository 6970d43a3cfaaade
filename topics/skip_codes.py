"""Why a learner skips a rollout: a code that programs go by, and words for people.

Records of earlier releases have the words alone. The codec reads the code out of them, here and nowhere else.
"""

import re
from typing import Any, NamedTuple

EXCLUDED = "excluded"
UNKNOWN_VERSION = "unknown_version"
STALE_VERSION = "stale_version"
ROW_CODES = ("vocabulary", "temperature", "logprobs", "advantage", "reference", "too_long")
"""Codes of single rows that cannot be trained on, in a batch that was taken."""
OTHER = "other"
"""What is counted where there is no code: a trainer of other code gave a reason of its own."""

_WORDS = [
    (EXCLUDED, re.compile(r"excluded: ")),
    *((code, re.compile(f"left out as {code}: ")) for code in ROW_CODES),
    (UNKNOWN_VERSION, re.compile(r"policy version -?\d+ is not on record$")),
    (STALE_VERSION, re.compile(r"policy version -?\d+ is \d+ steps old, max_policy_lag is ")),
    ("ahead", re.compile(r"weight step -?\d+ is ahead of step ")),
    ("old_step", re.compile(r"weight step -?\d+ is \d+ steps old, at most ")),
    ("too_old", re.compile(r"\S+ s old or more$")),
    ("capacity", re.compile(r"\d+ newer ones fill the buffer$")),
    ("used_up", re.compile(r"drawn \d+ times$")),
]


class Skip(NamedTuple):
    """Why something is skipped."""

    code: str
    reason: str


def code_of(reason: str) -> str:
    """The code of a reason that an earlier release wrote; "" where it is none of ours."""
    return next((code for code, words in _WORDS if words.match(reason)), "")


def add_codes(step: dict[str, Any]) -> None:
    """Give each use of a LearnerStep that was read from an older schema its code."""
    for use in step["uses"]:
        use["code"] = code_of(use["reason"])
