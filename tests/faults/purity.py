"""Part of the auditor: groups are whole and of one kind, rows are what was sent, advantages what the papers' formulas
give; worked out from the description of the format, sharing no code with the consumers.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.faults.evidence import Decoded, Raw, decode
from tests.faults.findings import Audit, Batch
from tests.faults.model import NotModelled, episode, equal, mean


def check_groups(
    records: list[Raw], batches: list[Batch], configurations: dict[int, dict[str, Any]], result: Audit
) -> None:
    """Rows are what was sent, groups are whole and of one kind, advantages are what the formula gives.

    A group is judged under the configurations that held between its last member and its batch. Raises NotModelled for a
    maker that takes groups apart.
    """
    if {config["maker"] for config in configurations.values()} != {"fifo"}:
        raise NotModelled("another maker")
    sources = {raw.offset: record for raw in records if (record := decode(raw.value)) is not None}
    least = any(config.get("min_group_size", 0) for config in configurations.values())
    shrunk = {_key(record.fields) for record in sources.values() if record.name == "GroupCancelled"}
    seen: dict[tuple[Any, ...], str] = {}
    for batch in batches:
        record = batch.record
        rows = len(record["uids"])
        if not len(record["source_offsets"]) == len(record["group_index"]) == len(record["splits"]) - 1 == rows:
            result.found("purity", f"batch {batch.name} has columns of different lengths")
            continue
        members: dict[int, list[int]] = defaultdict(list)
        for row in range(rows):
            members[int(record["group_index"][row])].append(row)
            _check_row(batch, row, sources, result)
        if sorted(members) != list(range(len(record["groups"]))):
            result.found("purity", f"batch {batch.name} has groups without rows, or rows without a group")
            continue
        for index, group in enumerate(record["groups"]):
            key = _key(group)
            if key in seen:
                result.found("purity", f"group {key} of batch {batch.name} is in batch {seen[key]} too")
            seen[key] = batch.name
            if group["size"] != len(members[index]):
                result.found(
                    "purity", f"group {key} of batch {batch.name} has {len(members[index])} rows of {group['size']}"
                )
            sent = [sources[offset] for offset in _sent(batch, members[index], sources)]
            _check_whole(f"group {key} of batch {batch.name}", sent, least or key in shrunk, result)
            if len(sent) == len(members[index]):
                last = max(batch.offsets[row] for row in members[index])
                before = max(offset for offset in configurations if offset < last)
                held = [
                    c
                    for offset, c in configurations.items()
                    if offset >= before and c["generation"] <= record["generation"]
                ]
                _check_advantages(batch, members[index], sent, key, held, result)


def _check_whole(where: str, sent: list[Decoded], may_lack: bool, result: Audit) -> None:
    """There are as many episodes as each member declares, each with all of its branches."""
    branches: dict[str, list[int]] = defaultdict(list)
    for rollout in sent:
        branches[episode(rollout)].append(rollout["branch"])
        if len(branches[episode(rollout)]) > rollout["branches"]:
            result.found("purity", f"{where} has branches of episode {episode(rollout)} twice")
    declared = {rollout["group_size"] for rollout in sent}
    if len(declared) != 1:
        result.found("purity", f"{where} declares sizes {sorted(declared)}")
    elif may_lack:
        return
    elif declared != {len(branches)}:
        result.found("purity", f"{where} has {len(branches)} episodes, it declared {declared}")
    for rollout in sent:
        if sorted(branches[episode(rollout)]) != list(range(rollout["branches"])):
            result.found("purity", f"{where} has branches {branches[episode(rollout)]} of {rollout['branches']}")
            break


def _key(fields: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(fields[name] for name in ("environment", "example_id", "policy_version", "group_id"))


def _sent(batch: Batch, rows: list[int], sources: dict[int, Decoded]) -> list[int]:
    """Offsets of the rows that have a rollout behind them."""
    offsets = [batch.offsets[row] for row in rows]
    return [offset for offset in offsets if offset in sources and sources[offset].name == "Rollout"]


def _check_row(batch: Batch, row: int, sources: dict[int, Decoded], result: Audit) -> None:
    record = batch.record
    offset = int(record["source_offsets"][row])
    where = f"row {row} of batch {batch.name} (offset {offset})"
    source = sources.get(offset)
    if source is None or source.name != "Rollout":
        result.found("purity", f"{where} has no rollout behind it")
        return
    group = record["groups"][int(record["group_index"][row])]
    for name in ("environment", "example_id", "policy_version", "group_id"):
        if source[name] != group[name]:
            result.found("purity", f"{where} is of {name} {source[name]!r}, its group of {group[name]!r}")
    span = slice(int(record["splits"][row]), int(record["splits"][row + 1]))
    for name in ("tokens", "loss_mask", "logprobs"):
        if record[name][span].tobytes() != source[name].tobytes():
            result.found("purity", f"{where} has other {name} than were sent")
    scalars = {
        "uids": "uid",
        "rewards": "reward",
        "truncated": "truncated",
        "lowest_versions": "lowest_version",
        "highest_versions": "highest_version",
    }
    for column, name in scalars.items():
        if record[column][row] != source[name]:
            result.found("purity", f"{where} has another {name} than was sent")


def _check_advantages(
    batch: Batch,
    rows: list[int],
    sent: list[Decoded],
    key: tuple[Any, ...],
    held: list[dict[str, Any]],
    result: Audit,
) -> None:
    """Advantages by the formula of one of the configurations, on every position of each row."""
    record = batch.record
    if {"reinforce_pp", "reinforce_pp_global"} & {config["estimator"] for config in held}:
        raise NotModelled("an estimator that looks at whole batches")
    compared = _compared(sent)
    if equal(compared.rewards):
        result.found("advantage", f"group {key} of batch {batch.name} has no variance and was batched")
    allowed = [_formula(config["estimator"], compared) for config in held]
    for at, row in enumerate(rows):
        given = record["advantages"][int(record["splits"][row]) : int(record["splits"][row + 1])]
        due = [advantages[compared.episode_of[at]] / compared.shared_by[at] for advantages in allowed]
        if not any(np.allclose(given, advantage, rtol=1e-6, atol=1e-6) for advantage in due):
            result.found(
                "advantage", f"row {row} of batch {batch.name} has advantage {given[:1]}, the formula gives {due}"
            )


@dataclass(frozen=True)
class _Compared:
    """Episodes that are compared within a group, N of them."""

    rewards: list[float]
    """Reward of each episode, [N]: the mean over its branches."""
    lengths: list[int]
    """Sampled tokens of each, [N]."""
    episode_of: list[int]
    """Index of each row's episode."""
    shared_by: list[int]
    """Among how many branches each row's advantage is shared."""


def _compared(sent: list[Decoded]) -> _Compared:
    names = [episode(rollout) for rollout in sent]
    episodes = list(dict.fromkeys(names))
    branches = [[r for name, r in zip(names, sent, strict=True) if name == uid] for uid in episodes]
    return _Compared(
        rewards=[mean([rollout["reward"] for rollout in own]) for own in branches],
        lengths=[sum(int(np.count_nonzero(rollout["loss_mask"])) for rollout in own) for own in branches],
        episode_of=[episodes.index(name) for name in names],
        shared_by=[rollout["branches"] for rollout in sent],
    )


def _formula(estimator: str, compared: _Compared) -> Any:
    """Advantages by the papers' formulas, in float64, [N]."""
    rewards, lengths = np.array(compared.rewards), np.array(compared.lengths, float)
    count, deviation = len(rewards), np.std(rewards) + 1e-8
    left_out = (count * rewards - rewards.sum()) / max(1, count - 1)
    formulas = {
        "rloo": left_out,
        "rloo_normalized": left_out / deviation,
        "grpo": (rewards - rewards.mean()) / deviation,
        "dr_grpo": rewards - rewards.mean(),
        "opo": rewards - np.average(rewards, weights=lengths if lengths.any() else None),
    }
    if estimator not in formulas:
        raise NotModelled(f"estimator {estimator}")
    return formulas[estimator]
