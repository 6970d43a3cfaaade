"""Costs of the fold while many groups are open: of a rollout, a commit, a snapshot and a restore."""

import time
from collections.abc import Sequence

from rollstream.consumers.grouping.core.fold import Fold
from rollstream.consumers.grouping.core.task_state import restored_state
from tests.bench.fold_row import fold_with, record_at, steps
from tests.bench.growth.series import Series, collected

_ROLLOUTS = 4000
_COMMIT_EVERY = 250
_MADE_AT_ONCE = 5000


def measure(sizes: Sequence[int]) -> list[Series]:
    """Return the processor time of each operation at each number of open groups."""
    points: dict[str, list[tuple[float, float]]] = {"rollout": [], "commit": [], "snapshot": [], "restore": []}
    for size in sizes:
        for name, seconds in _costs(size).items():
            points[name].append((size, seconds))
    over = "open groups"
    return [
        collected("a rollout folded", over, "us", 0, [(n, 1e6 * s) for n, s in points["rollout"]]),
        collected(f"{_COMMIT_EVERY} committed", over, "ms", 0, [(n, 1e3 * s) for n, s in points["commit"]]),
        collected("a snapshot", over, "ms", 1, [(n, 1e3 * s) for n, s in points["snapshot"]]),
        collected("a restore", over, "s", 1, points["restore"]),
    ]


def _costs(open_groups: int) -> dict[str, float]:
    fold = fold_with(open_groups)
    began = time.process_time()
    snapshot = fold.prepare_commit(snapshot=True)
    costs = {"snapshot": time.process_time() - began}

    began = time.process_time()
    restored = Fold(restored_state(snapshot.records))
    costs["restore"] = time.process_time() - began
    for offsets in _portions(open_groups):
        records = [record_at(offset, offset, 0) for offset in offsets]
        began = time.process_time()
        for record in records:
            restored.replay(record)
        costs["restore"] += time.process_time() - began
    restored.resume()
    if restored.open_groups != open_groups:
        raise RuntimeError(f"{restored.open_groups} groups are open after a restore, {open_groups} were before")
    del restored

    costs |= {"rollout": 0.0, "commit": 0.0}
    records = steps(open_groups, open_groups, _ROLLOUTS)
    for at in range(0, _ROLLOUTS, _COMMIT_EVERY):
        began = time.process_time()
        for record in records[at : at + _COMMIT_EVERY]:
            fold.apply(record)
        folded = time.process_time()
        fold.prepare_commit()
        costs["rollout"] += (folded - began) / _ROLLOUTS
        costs["commit"] += (time.process_time() - folded) * _COMMIT_EVERY / _ROLLOUTS
    return costs


def _portions(count: int) -> list[range]:
    return [range(at, min(at + _MADE_AT_ONCE, count)) for at in range(0, count, _MADE_AT_ONCE)]
