"""Group stores for tests: rollouts of groups, a clock that is set, and stores that open with either."""

import uuid
from pathlib import Path
from typing import Any

from rollstream.consumers.buffers.groups.config import GroupStoreConfig
from rollstream.consumers.buffers.groups.store import GroupReplayBuffer
from rollstream.consumers.grouping.makers.batch_maker import BatchMaker, MakerContext
from rollstream.consumers.grouping.testing import example_rollout
from rollstream.topics.records import Rollout


def attempt(n: int, example: str = "q", version: int = 0, **fields: Any) -> Rollout:
    """Rollout `n` of a group; rewards alternate, so advantages are not zero."""
    fields.setdefault("reward", float(n % 2))
    return example_rollout(f"{example}-{version}-{n}", example_id=example, policy_version=version, **fields)


def group(example: str = "q", version: int = 0, size: int = 8) -> list[Rollout]:
    return [attempt(n, example, version) for n in range(size)]


def context() -> MakerContext:
    return MakerContext(partition=0, seed=7, batch_bytes=2**30)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def opened(path: Path, maker: BatchMaker | None = None, clock: Clock | None = None, **config: Any) -> GroupReplayBuffer:
    return GroupReplayBuffer(path, "env", GroupStoreConfig(**config), batch_maker=maker, clock=clock or Clock())


def seen(path: Path) -> GroupReplayBuffer:
    """A read-only store."""
    return GroupReplayBuffer(path, "env", read_only=True)


def uuid_of(group_id: str) -> uuid.UUID:
    """The UUID in the name of a group's file."""
    return uuid.UUID(group_id[:32])
