"""Reasons for which a learner skips a rollout: a code for programs, and a text for people."""

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


class Skip(NamedTuple):
    """Why a learner skips a batch or a row."""

    code: str
    reason: str
