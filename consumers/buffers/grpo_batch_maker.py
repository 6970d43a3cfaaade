"""A batch maker that also works by itself: single rollouts in, batches of examples with group-relative advantages out.

Purely in memory. Given to a store of groups it is a ReservoirBatchMaker.
"""

from collections.abc import Iterable

from consumers.buffers.forwarding import examples_of
from consumers.buffers.group_files import Placed, group_of
from consumers.buffers.rollout_record import RolloutRecord, as_rollout
from consumers.grouping.batch_maker import MakerContext, SealedGroup
from consumers.grouping.reservoir import ReservoirBatchMaker
from topics.errors import RecordError
from topics.examples import RLExample, Source
from topics.records import Rollout

_BATCH_BYTES = 2**40
"""No bound: batches that stay in memory need none."""


class GrpoBatchMaker(ReservoirBatchMaker):
    """Groups rollouts by (environment, example, policy version), keeps each example's latest version only, and draws
    from those whose advantage (`rloo`) is not zero.

    A rollout is delivered once; advantages of what is not delivered yet follow the group as it grows.
    """

    def __init__(self, rng_seed: int = 0, environment_name: str = "") -> None:
        """`environment_name` is the one environment whose rollouts are taken; any, where it is empty."""
        super().__init__(MakerContext(partition=0, seed=rng_seed, batch_bytes=_BATCH_BYTES))
        self.environment_name = environment_name
        self._groups: dict[tuple[str, str], list[Placed]] = {}
        """Rollouts that were added one by one, by environment and example: those of the latest version."""
        self._grown: set[tuple[str, str]] = set()
        self._delivered: set[Source] = set()
        self._drawn = 0

    def add_rollout(self, example: RLExample | Rollout | RolloutRecord, group: SealedGroup | None = None) -> None:
        """Take a rollout: with its sealed group from a store, without one from anybody else.

        One whose uid its group has, or of a version that a newer one took the place of, is passed over. Raises
        RecordError for one of another environment.
        """
        if isinstance(example, RLExample):
            if group is None:
                raise RecordError(f"example {example.source.uid!r} comes without its group; give the rollout itself")
            super().add_rollout(example, group)
            return
        rollout = as_rollout(example) if isinstance(example, RolloutRecord) else example
        if self.environment_name not in ("", rollout.environment):
            raise RecordError(
                f"rollout {rollout.uid!r} is of environment {rollout.environment!r}, this maker takes those of "
                f"{self.environment_name!r}"
            )
        key = (rollout.environment, rollout.example_id)
        members = self._groups.setdefault(key, [])
        latest = members[0].rollout.policy_version if members else rollout.policy_version
        if rollout.policy_version > latest:
            self._forget(members)
            members.clear()
        elif rollout.policy_version < latest or any(rollout.uid == member.rollout.uid for member in members):
            return
        members.append(Placed(rollout, Source(-1, -1, rollout.uid)))
        self._grown.add(key)

    def create_batch(self, batch_size: int) -> list[RLExample] | None:
        """`batch_size` examples in an order drawn by the seed, or None where fewer are held."""
        for key in sorted(self._grown):
            members = self._groups[key]
            self._forget(members)
            sealed, rows = examples_of(group_of(members, 0.0), "rloo")
            for row in rows:
                if row.source not in self._delivered:
                    super().add_rollout(row, sealed)
        self._grown.clear()
        if self._groups:
            self.take_discarded()  # no store asks for them
            self.batch_number = self._drawn
        batch = super().create_batch(batch_size)
        if batch is not None and self._groups:
            self._drawn += 1
            self._delivered.update(row.source for row in batch)
        return batch

    def _forget(self, members: Iterable[Placed]) -> None:
        self.discard([member.source for member in members if member.source in self._numbers])
