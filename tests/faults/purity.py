"""Part of the auditor: groups are whole and of one kind, rows are what was sent, advantages what the papers' formulas
give; worked out from the description of the format, sharing no code with the consumers.
"""

from collections import Counter, defaultdict
from typing import Any

import numpy as np

from tests.faults.evidence import Decoded, Raw, decode
from tests.faults.findings import Audit, Batch
from tests.faults.model import NotModelled


def _episode(rollout: Decoded) -> str:
    """What a rollout counts for: its episode, where that has several branches."""
    return str(rollout["episode_uid"] if rollout["branches"] > 1 else rollout["uid"])


def check_groups(
    records: list[Raw], batches: list[Batch], configurations: dict[int, dict[str, Any]], result: Audit
) -> None:
    """Rows are what was sent, groups are whole and of one kind, advantages are what the formula gives.

    A group is judged under the configurations that held between its last member and its batch.
    """
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
                _check_advantages(batch, members[index], sent, key, {c["estimator"] for c in held}, result)


def _check_whole(where: str, sent: list[Decoded], may_lack: bool, result: Audit) -> None:
    """As many episodes as each member declares, each with all of its branches."""
    branches: dict[str, list[int]] = defaultdict(list)
    for rollout in sent:
        branches[_episode(rollout)].append(rollout["branch"])
        if len(branches[_episode(rollout)]) > rollout["branches"]:
            result.found("purity", f"{where} has branches of episode {_episode(rollout)} twice")
    declared = {rollout["group_size"] for rollout in sent}
    if len(declared) != 1:
        result.found("purity", f"{where} declares sizes {sorted(declared)}")
    elif may_lack:
        return
    elif declared != {len(branches)}:
        result.found("purity", f"{where} has {len(branches)} episodes, it declared {declared}")
    for rollout in sent:
        if sorted(branches[_episode(rollout)]) != list(range(rollout["branches"])):
            result.found("purity", f"{where} has branches {branches[_episode(rollout)]} of {rollout['branches']}")
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
    batch: Batch, rows: list[int], sent: list[Decoded], key: tuple[Any, ...], estimators: set[str], result: Audit
) -> None:
    """One of the formulas, on every position of each row.

    Since core version 2 what is compared are episodes: their rewards are the means of their branches', which share the
    advantage. Before it every branch was compared by itself.
    """
    record = batch.record
    rewards, lengths, shares = _compared(sent, by_episode=record["core_version"] > 1)
    if len(set(rewards)) == 1:
        result.found("advantage", f"group {key} of batch {batch.name} has no variance and was batched")
    wanted = [_formula(name, np.array(rewards), np.array(lengths)) for name in sorted(estimators)]
    for row, (unit, share) in zip(rows, shares, strict=True):
        given = record["advantages"][int(record["splits"][row]) : int(record["splits"][row + 1])]
        due = [advantages[unit] / share for advantages in wanted]
        if not any(np.allclose(given, advantage, rtol=1e-6, atol=1e-6) for advantage in due):
            result.found(
                "advantage", f"row {row} of batch {batch.name} has advantage {given[:1]}, the formula gives {due}"
            )


def _compared(sent: list[Decoded], *, by_episode: bool) -> tuple[list[float], list[float], list[tuple[int, int]]]:
    """Rewards and lengths of what is compared; for each row which of them it is, and among how many it is shared."""
    names = [_episode(rollout) if by_episode else rollout["uid"] for rollout in sent]
    units = list(dict.fromkeys(names))
    count = Counter(names)
    rewards, lengths = [], []
    for unit in units:
        own = [rollout for name, rollout in zip(names, sent, strict=True) if name == unit]
        rewards.append(sum(rollout["reward"] for rollout in own) / len(own))
        lengths.append(float(sum(np.count_nonzero(rollout["loss_mask"]) for rollout in own)))
    return rewards, lengths, [(units.index(name), count[name]) for name in names]


def _formula(estimator: str, rewards: Any, lengths: Any) -> Any:
    """Advantages by the papers' formulas, in float64, [n]."""
    count, deviation = len(rewards), np.std(rewards) + 1e-8
    left_out = (count * rewards - rewards.sum()) / max(1, count - 1)
    formulas = {
        "rloo": left_out,
        "rloo_normalized": left_out / deviation,
        "grpo": (rewards - rewards.mean()) / deviation,
        "dr_grpo": rewards - rewards.mean(),
        "opo": rewards - (lengths * rewards).sum() / max(1.0, lengths.sum()),
    }
    if estimator not in formulas:
        raise NotModelled(f"estimator {estimator}")
    return formulas[estimator]
