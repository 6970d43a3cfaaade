"""The limits of a task's memory hold under pressure, and each entry takes at most the memory it counts for."""

import gc
import re
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import numpy as np
import pytest

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core import group_tables, task_state
from rollstream.consumers.grouping.core.effects import InputRecord
from rollstream.consumers.grouping.core.fold import Fold
from rollstream.consumers.grouping.core.group_tables import finished_group_cost
from rollstream.consumers.grouping.core.groups import GroupKey
from rollstream.consumers.grouping.core.task_journal import FateCounts, JournalPointers
from rollstream.consumers.grouping.testing import example_rollout
from rollstream.topics.records import FinishedGroup, GroupCancelled, NamedArray, Rollout, Turn
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from rollstream.topics.wire.rl_examples import REFERENCE
from tests.support.pages import page, section

T = TypeVar("T")

STATED = {
    entry.strip(): int(figure.replace(",", ""))
    for entry, figure in re.findall(
        r"^\| ([^|]+) \|[^|]*\| ([\d,]+) \|", section(page("runbook"), "Memory"), re.MULTILINE
    )
}


def fold(**config: object) -> Fold:
    first = task_state.initial_record(0, 1, "test", GroupingConfig(**config))  # type: ignore[arg-type]
    return Fold(task_state.restored_state([replace(first, policy_version=0, watermark_policy_version=0)]))


def record(offset: int, event: Rollout | GroupCancelled, at_ms: int = 0) -> InputRecord:
    return InputRecord(offset, at_ms, encode_key(event.environment, event.example_id), encode(event))


# ---------------------------------------------------------------------- costs


def filled(events: Iterable[Rollout | GroupCancelled], **config: object) -> Fold:
    tested = fold(**{"capacity_bytes": 10**12, "batch_rollouts": 10**6, "batch_bytes": 10**9, **config})
    for offset, event in enumerate(events):
        tested.apply(record(offset, event, offset))
        if offset % 100 == 0:
            tested.prepare_commit()
    tested.prepare_commit()
    return tested


def members(groups: int, size: int, *, seal: bool = False, tokens: int = 4, **fields: Any) -> Iterator[Rollout]:
    """Rollouts of groups; with `seal` the groups are complete, otherwise each lacks one member."""
    for group in range(groups):
        for member in range(size):
            yield example_rollout(
                f"some-worker-7.{group}.{member}",
                float(member),
                example_id=f"example-{group}",
                group_size=size if seal else size + 1,
                tokens=np.zeros(tokens, "<i4"),
                **fields,
            )


def cancellations(groups: int, uids: int) -> Iterator[GroupCancelled]:
    for group in range(groups):
        yield GroupCancelled(
            environment="env",
            example_id=f"example-{group}",
            policy_version=0,
            group_size=uids + 1,
            uids=tuple(f"some-worker-7.{group}.{number}" for number in range(uids)),
        )


def with_reference(tokens: int) -> dict[str, Any]:
    array = NamedArray(dtype="<f4", shape=(tokens,), data=bytes(4 * tokens))
    return {"tokens": tokens, "token_arrays": {REFERENCE: array}}


WORDY = {
    "turns": tuple(Turn(role="user", text="and then?") for _ in range(200)),
    "extra": {f"key {number}": "value" for number in range(100)},
    "reward_components": {f"component {number}": 0.5 for number in range(100)},
}
"""Fields with which a rollout of 6 KB in the log takes 80 KB in memory."""


@pytest.mark.parametrize(
    "fill",
    [
        pytest.param(lambda: filled(members(100, 1)), id="groups of one short rollout"),
        pytest.param(lambda: filled(members(10, 7, tokens=2560)), id="groups of long rollouts"),
        pytest.param(lambda: filled(members(15, 8, seal=True)), id="sealed groups of short rollouts"),
        pytest.param(lambda: filled(members(6, 8, seal=True, **with_reference(2560))), id="with a reference"),
        pytest.param(lambda: filled(members(15, 8, seal=True), maker="reservoir"), id="in the reservoir"),
        pytest.param(lambda: filled(members(80, 1, episode_uid="e", branches=2)), id="branches"),
        pytest.param(lambda: filled(members(20, 1, **WORDY)), id="wordy rollouts"),
        pytest.param(lambda: filled(members(80, 1, environment="é" * 500)), id="long names"),
        pytest.param(lambda: filled(cancellations(80, 1)), id="cancellations"),
        pytest.param(lambda: filled(cancellations(15, 300)), id="long cancellations"),
    ],
)
def test_groups_take_at_most_the_memory_they_count_for_and_not_much_less(fill: Callable[[], Fold]) -> None:
    kept, taken = traced(fill)
    print(f"{kept.held_bytes / taken:.2f} of what is taken is counted")
    assert taken <= kept.held_bytes <= 3 * taken


@pytest.mark.parametrize("environment", ["env", "é" * 500])
def test_finished_groups_take_at_most_the_memory_they_count_for(environment: str) -> None:
    groups = 200

    def fill() -> Fold:
        return filled(members(groups, 2, seal=True, environment=environment), batch_rollouts=2)

    kept, taken = traced(fill)
    assert kept.held_bytes == kept.open_groups == 0
    counted = groups * finished_group_cost(GroupKey(environment, "example-000", 0, ""))
    print(f"{counted / taken:.2f} of what is taken is counted")
    assert taken <= counted <= 3 * taken


def test_the_documentation_gives_the_costs_that_are_counted() -> None:
    names = {
        "a group": group_tables.GROUP,
        "a rollout in a group": group_tables.MEMBER,
        "a token of a rollout": group_tables.TOKEN,
        "a cancellation": group_tables.CANCELLATION,
        "a cancelled uid": group_tables.UID,
        "a finished group": group_tables.FINISHED_GROUP,
    }
    assert {name: STATED[name] for name in names} == names


def traced(fill: Callable[[], T]) -> tuple[T, int]:
    """Return the result of `fill` and the bytes that it takes."""
    fill()  # Objects that are made only once are not counted.
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        kept = fill()
        gc.collect()
        return kept, tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def journal_pointers(count: int) -> JournalPointers:
    pointers = JournalPointers(0, 0)
    for second in range(count):
        at_ms = 10**12 + 1000 * second
        group = FinishedGroup(
            environment="e", example_id="x", policy_version=0, group_id="", sealed_ms=at_ms, finished_ms=at_ms
        )
        pointers.add_finished_groups(
            10**9 + second, replace(task_state.initial_record(0, 1, "test", GroupingConfig()), finished_groups=(group,))
        )
    return pointers


def counts(count: int) -> FateCounts:
    counts = FateCounts()
    for environment in range(count):
        counts.add(f"environment {environment:04d}", "batched", 5)
    counts.records()
    return counts


@pytest.mark.parametrize(
    ("entry", "fill", "count"),
    [
        ("a second of stream time in the journal's places", journal_pointers, 600),
        ("an environment and fate in the counts", counts, 500),
    ],
)
def test_an_entry_takes_about_the_memory_that_is_stated(entry: str, fill: Callable[[int], object], count: int) -> None:
    _kept, taken = traced(lambda: fill(count))
    print(f"{entry}: {taken / count:.0f} bytes")
    assert 0.6 * STATED[entry] < taken / count <= STATED[entry]


@pytest.mark.long
def test_one_group_that_stays_open_keeps_nothing_of_others_in_memory() -> None:
    def fill(groups: int) -> Fold:
        tested = fold(batch_rollouts=2, remembered_bytes=0)
        lone = example_rollout("lone", 1.0, example_id="lone")
        for offset, event in enumerate([lone, *members(groups, 2, seal=True)]):
            tested.apply(record(offset, event))
            tested.prepare_commit()
        assert tested.in_flight == 1
        return tested

    few, many = (traced(lambda groups=groups: fill(groups))[1] for groups in (100, 500))  # type: ignore[misc]
    assert many < few + 20_000


# ---------------------------------------------------------------------- bounds


def pressed(tested: Fold, rollouts: int, seed: int) -> list[int]:
    """Apply rollouts whose groups mostly never complete, or wait for the policy clock; return held bytes after each."""
    random = Random(seed)
    held = []
    for offset in range(tested.position, tested.position + rollouts):
        group, member = str(random.randrange(offset + 1)), random.randrange(4)
        version = random.choice((0, 0, 0, 1))
        rollout = example_rollout(
            f"{group}.{version}.{member}",
            random.random(),
            # There are few examples, because a cache outside the task keeps their keys.
            example_id=str(offset % 50),
            group_id=group,
            group_size=random.choice((1, 4)) if version else 4,
            policy_version=version,
            tokens=np.zeros(random.randrange(1, 400), "<i4"),
        )
        tested.apply(record(offset, rollout, 20 * offset))
        held.append(tested.held_bytes)
        if offset % 100 == 99:
            tested.prepare_commit(snapshot=offset % 1000 == 999)
    return held


PRESSED: dict[str, Any] = {
    "capacity_bytes": 400_000,
    "batch_bytes": 5_000,
    "group_deadline_s": 1e6,
    "future_deadline_s": 1e6,
    "remembered_bytes": 100_000,
}


def test_held_bytes_never_pass_the_capacity() -> None:
    tested = fold(**PRESSED)
    held = pressed(tested, 1_000, 0)
    assert max(held) <= 400_000
    assert min(held[300:]) > 350_000
    dropped = {count.fate: count.rollouts for count in tested.counts}
    assert dropped["dropped:capacity"] > 200


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_resident_memory_is_flat_under_keys_that_never_repeat() -> None:
    tested = fold(**{**PRESSED, "capacity_bytes": 16 << 20, "remembered_bytes": 4 << 20})
    resident = []
    for part in range(10):
        for number in range(part * 10_000, (part + 1) * 10_000):
            # Three of four groups never complete.
            for uid in "ab" if number % 4 == 0 else "a":
                rollout = example_rollout(uid, float(uid == "a"), example_id=f"example-{number}", tokens=SHORT)
                tested.apply(record(tested.position, rollout, tested.position // 10))
            if number % 100 == 0:
                tested.prepare_commit(snapshot=number % 1000 == 0)
        resident.append(resident_bytes())
    print([size >> 20 for size in resident])
    # Every limit is reached within the first parts; later changes come from the allocator. A leak of 340 bytes per key
    # would add more than 16 MiB.
    assert max(resident[5:]) < resident[4] + (16 << 20)


SHORT = np.array([1, 2], "<i4")


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))
