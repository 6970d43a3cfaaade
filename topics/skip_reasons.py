"""Reasons for which a learner skips a rollout: a code for programs, and a text for people."""

import re
from typing import NamedTuple

EXCLUDED = "excluded"
UNKNOWN_VERSION = "unknown_version"
STALE_VERSION = "stale_version"
ROW_CODES = ("vocabulary", "temperature", "logprobs", "advantage", "reference", "too_long")
"""Codes of single rows that cannot be trained on, in a batch that is used."""
ENDED = "ended"
"""Code of rollouts that a buffer held when the run ended, and that no step had drawn."""
OTHER = "other"
"""Code under which reasons without a code are counted, such as the reasons of a foreign trainer."""

_TEXTS = [
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
    """Why a learner skips a batch or a row."""

    code: str
    reason: str


def code_of(reason: str) -> str:
    """Return the code that a reason's text tells; "" if the reason is not one of ours."""
    return next((code for code, text in _TEXTS if text.match(reason)), "")
