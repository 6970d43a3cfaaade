"""Which prompts are held out: one in five, the same ones in every process, chosen by nothing the task is about."""

import hashlib
from collections.abc import Iterable

from producers.environment import Prompt, Split

HELD_OUT_EVERY = 5


def split_prompts(name: str, prompts: Iterable[Prompt]) -> dict[Split, tuple[Prompt, ...]]:
    """Both splits of a task's prompts; `name` is the task's.

    Prompts are ordered by the sha256 of their names and every fifth is held out: exactly a fifth, and no digit or
    operand is missing from training as it would be if every fifth in counting order were taken.
    """
    ordered = sorted(prompts, key=lambda p: hashlib.sha256(f"{name}/{p.example_id}".encode()).digest())
    return {
        "train": tuple(p for i, p in enumerate(ordered) if i % HELD_OUT_EVERY),
        "heldout": tuple(ordered[::HELD_OUT_EVERY]),
    }
