"""Findings of `rollstream doctor`: what was looked at, how it is, and what helps."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "fault"]
"""`note` is for people to judge; `fault` needs the remedy."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    check: str
    """The part of the examination, such as brokers, permissions, topics, retention, clock."""
    level: Level
    text: str
    remedy: str = ""
    """Empty if there is nothing to mend."""
