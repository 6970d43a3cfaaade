"""Splits prompts: every fifth is held out. All processes make the same choice, which does not depend on content."""

import hashlib
from collections.abc import Iterable

from rollstream.producers.environments.environment import Prompt, Split

HELD_OUT_EVERY = 5


def split_prompts(name: str, prompts: Iterable[Prompt]) -> dict[Split, tuple[Prompt, ...]]:
    """Return both splits of a task's prompts; `name` is the name of the task.

    Prompts are ordered by the sha256 of their names, and every fifth is held out. In counting order, every fifth would
    remove a digit or operand from training.
    """
    ordered = sorted(prompts, key=lambda p: hashlib.sha256(f"{name}/{p.example_id}".encode()).digest())
    return {
        "train": tuple(p for i, p in enumerate(ordered) if i % HELD_OUT_EVERY),
        "heldout": tuple(ordered[::HELD_OUT_EVERY]),
    }
