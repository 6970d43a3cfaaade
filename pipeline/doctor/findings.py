"""Findings of `rollstream doctor`: what was checked, its state, and a remedy."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "fault"]
"""`note` is for people to judge; `fault` needs the remedy."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check."""

    check: str
    """Name of the check, such as brokers, permissions, topics, retention, clock."""
    level: Level
    text: str
    remedy: str = ""
    """Empty if there is nothing to fix."""
