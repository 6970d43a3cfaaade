"""A batch maker that also works without a store: it takes single rollouts and makes batches of examples with
group-relative advantages, in memory.

In a store of groups it acts as a ReservoirBatchMaker.
"""

from collections.abc import Iterable

from rollstream.consumers.buffers.groups.forwarding import examples_of
from rollstream.consumers.buffers.groups.group_files import PlacedRollout, group_of
from rollstream.consumers.buffers.rollouts.record import RolloutRecord, as_rollout
from rollstream.consumers.grouping.makers.batch_maker import MakerContext, SealedGroup
from rollstream.consumers.grouping.makers.reservoir import ReservoirBatchMaker
from rollstream.topics.errors import RecordError
from rollstream.topics.records import Rollout
from rollstream.topics.wire.rl_examples import RLExample, Source

_BATCH_BYTES = 2**40
"""No limit in practice, because batches in memory need none."""


class GrpoBatchMaker(ReservoirBatchMaker):
    """Groups rollouts by (environment, example, policy version), keeps only the latest version of each example, and
    draws from rollouts with a nonzero advantage (`rloo`).

    A rollout is delivered once. Advantages of undelivered rollouts change as their group grows.
    """

    def __init__(self, rng_seed: int = 0, environment_name: str = "") -> None:
        """`environment_name` is the only environment whose rollouts are accepted; empty accepts all."""
        super().__init__(MakerContext(partition=0, seed=rng_seed, batch_bytes=_BATCH_BYTES))
        self.environment_name = environment_name
        self._groups: dict[tuple[str, str], list[PlacedRollout]] = {}
        """Single rollouts of the latest version, by environment and example."""
        self._grown: set[tuple[str, str]] = set()
        self._delivered: set[Source] = set()
        self._drawn = 0

    def add_rollout(self, example: RLExample | Rollout | RolloutRecord, group: SealedGroup | None = None) -> None:
        """Add a rollout. A store passes its sealed group; other callers pass no group.

        A rollout with a known uid, or of a superseded version, is skipped. Raises RecordError for a rollout of another
        environment.
        """
        if isinstance(example, RLExample):
            super().add_rollout(example, group)
            return
        rollout = as_rollout(example) if isinstance(example, RolloutRecord) else example
        if self.environment_name not in ("", rollout.environment):
            raise RecordError(
                f"rollout {rollout.uid!r} is of environment {rollout.environment!r}, but this maker accepts "
                f"only {self.environment_name!r}; use another maker for it"
            )
        key = (rollout.environment, rollout.example_id)
        members = self._groups.setdefault(key, [])
        latest = members[0].rollout.policy_version if members else rollout.policy_version
        if rollout.policy_version > latest:
            self._forget(members)
            members.clear()
        elif rollout.policy_version < latest or any(rollout.uid == member.rollout.uid for member in members):
            return
        members.append(PlacedRollout(rollout, Source(-1, -1, rollout.uid)))
        self._grown.add(key)

    def create_batch(self, batch_size: int) -> list[RLExample] | None:
        """Return `batch_size` examples in an order drawn from the seed, or None if there are fewer."""
        for key in sorted(self._grown):
            members = self._groups[key]
            self._forget(members)
            sealed, rows = examples_of(group_of(members, 0.0), "rloo")
            for row in rows:
                if row.source not in self._delivered:
                    super().add_rollout(row, sealed)
        self._grown.clear()
        if self._groups:
            self.take_discarded()  # Without a store, discarded rollouts are not counted.
            self.batch_number = self._drawn
        batch = super().create_batch(batch_size)
        if batch is not None and self._groups:
            self._drawn += 1
            self._delivered.update(row.source for row in batch)
        return batch

    def _forget(self, members: Iterable[PlacedRollout]) -> None:
        self.discard([member.source for member in members if member.source in self._numbers])
