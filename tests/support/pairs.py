"""Small logs of groups of two, and what tests read from them."""

from typing import Any

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core import task_state
from rollstream.consumers.grouping.testing import GroupingTestDriver, example_rollout
from rollstream.topics.records import GroupCancelled


def driver(policy_version: int = 0, **config: Any) -> GroupingTestDriver:
    """A driver that cuts every complete pair, unless told otherwise."""
    return GroupingTestDriver(GroupingConfig(**{"batch_rollouts": 2, **config}), policy_version=policy_version)


def pair(d: GroupingTestDriver, example_id: str = "0", **fields: Any) -> None:
    """Append a group of two with variance."""
    d.pipe(example_rollout(f"{example_id}a", 1.0, example_id=example_id, **fields))
    d.pipe(example_rollout(f"{example_id}b", 0.0, example_id=example_id, **fields))


def cancelled(*uids: str, size: int = 2, **fields: Any) -> GroupCancelled:
    return GroupCancelled(
        environment="env", example_id="0", policy_version=fields.pop("policy_version", 0), group_size=size, uids=uids
    )


def reasons(d: GroupingTestDriver) -> dict[int, str]:
    return {drop.offset: drop.reason for drop in d.drops}


def uids(d: GroupingTestDriver) -> list[tuple[str, ...]]:
    return [batch.uids for batch in d.batches]


def fates(d: GroupingTestDriver) -> dict[str, int]:
    return {count.fate: count.rollouts for count in task_state.restored_state(d.journal).counts}
