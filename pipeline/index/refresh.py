"""Recomputes the figures of an index that depend on several of its rows, whenever one of these rows has changed."""

import json
import math
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from rollstream.pipeline.index import fates

_TRAINED, _SKIPPED, _BATCHED = (fates.CODES[name] for name in (fates.TRAINED, fates.SKIPPED, "batched"))
_UPDATE_GROUP = """update groups set members = ?, mean = ?, std = ?, lowest = ?, highest = ?, zero_variance = ?,
    fate = ?, time_ms = ?, first = ? where id = ?"""
_UPDATE_ROLLOUT = """update rollouts set fate = ?, step = ?, reason = ? where id = ?
    and (fate is not ? or step is not ? or reason is not ?)"""


class _Use(NamedTuple):
    """A step's use of one row of a batch."""

    trained: int
    step: int
    reason: str


def groups(connection: sqlite3.Connection, numbers: Iterable[int]) -> None:
    """Compute the figures of groups from their members."""
    rows = []
    for number in sorted(numbers):
        answer = connection.execute(
            "select reward, fate, time_ms, id from rollouts where grp = ?", (number,)
        ).fetchall()
        members = sorted(answer, key=lambda row: row[3])
        if not members:
            continue
        rewards = [row[0] for row in members if row[0] is not None]
        count = len(rewards)
        mean = math.fsum(rewards) / count if count else None
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / count) if mean is not None else None
        low, high = min(rewards, default=None), max(rewards, default=None)
        fate = _fate_of_most([row[1] for row in members])
        when = members[0][2], members[0][3]
        rows.append((len(members), mean, std, low, high, int(count > 1 and low == high), fate, *when, number))
    connection.executemany(_UPDATE_GROUP, rows)


def _fate_of_most(codes: list[int]) -> int:
    """Return the most frequent fate of the members; among equally frequent fates, the one with the highest number."""
    counts = Counter(codes)
    return max(counts, key=lambda code: (counts[code], code))


def uses_of_batch(connection: sqlite3.Connection, batch: str, name: Callable[[str, str], int]) -> set[int]:
    """Update the fates of a batch's rollouts from the steps that used them; return the groups of these rollouts.

    A rollout that any step of any learner trained on counts as trained at the first of these steps.
    """
    answer = connection.execute("select id from batches where name = ?", (batch,)).fetchone()
    members = connection.execute(
        "select id, batch_row, fate, grp from rollouts where batch = ?", answer or (None,)
    ).fetchall()
    if not members:
        return set()
    uses = _uses_by_row(connection, batch, [row for _id, row, _fate, _group in members])
    changes: list[tuple[int | None, ...]] = []
    for row_id, row, fate, _group in members:
        use = uses.get(row)
        if use is not None:
            reason = name("reason", use.reason) if use.reason else None
            change: tuple[int | None, ...]
            change = (_TRAINED, use.step, None) if use.trained else (_SKIPPED, use.step, reason)
        elif fate in (_TRAINED, _SKIPPED):
            change = (_BATCHED, None, None)
        else:
            continue
        changes.append((*change, row_id, *change))
    connection.executemany(_UPDATE_ROLLOUT, changes)
    return {group for _id, _row, _fate, group in members if group is not None}


def _uses_by_row(connection: sqlite3.Connection, batch: str, rows: list[int]) -> dict[int, _Use]:
    """Return the use that counts for each row: the first that trained on the row, else the first that skipped it."""
    answer = connection.execute(
        "select trained, step, reason, row_numbers from uses where batch = ?"
        " order by trained desc, step, learner, part",
        (batch,),
    )
    uses: dict[int, _Use] = {}
    for trained, step, reason, numbers in answer:
        for row in json.loads(numbers) or rows:
            uses.setdefault(row, _Use(trained, step, reason))
    return uses
