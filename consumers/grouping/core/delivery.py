"""Delivery of sealed groups to the batch maker and of the maker's batches, with a check that no rollout is lost.

The maker holds every rollout that is offered to it, delivers it in a batch, or reports it as discarded; anything else
is an error.
"""

import json
from typing import Literal, NamedTuple

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core import batch_assembly
from rollstream.consumers.grouping.core.batch_assembly import over_batch
from rollstream.consumers.grouping.core.effects import EncodedBatch
from rollstream.consumers.grouping.core.groups import Group, Stage
from rollstream.consumers.grouping.core.held_rollouts import HeldExample, is_of
from rollstream.consumers.grouping.core.plug_ins import PlugIns, batch_maker
from rollstream.consumers.grouping.makers.batch_maker import BatchMaker, MakerContext, SealedGroup, example_bytes
from rollstream.topics.errors import StateRefused
from rollstream.topics.records.fates import BATCHED
from rollstream.topics.wire.rl_examples import RLExample

_METADATA_LIMIT = 4096
"""Maximum number of characters of a batch's metadata, all ASCII; they do not count in grouping.batch_bytes."""


class CutBatch(NamedTuple):
    """A batch, and the group of each of its rows."""

    batch: EncodedBatch
    groups: list[Group]


class BatchDelivery:
    """The batch maker of one partition and the groups that were offered to it."""

    def __init__(
        self,
        partition: int,
        batch_number: int,
        delivered_before: frozenset[int],
        config: GroupingConfig,
        plug_ins: PlugIns,
    ) -> None:
        """`delivered_before` are offsets that a batch already carries, although their groups are not finished."""
        self.batch_number = batch_number
        self._partition = partition
        self._delivered_before = delivered_before
        self._plug_ins = plug_ins
        self._config = config
        self.untouched = True
        """Whether the maker had no batch to make and still holds the same rollouts."""
        self._offered: dict[Group, None] = {}
        self._held: dict[int, Group] = {}
        self._discarded: list[Group] = []
        self._maker = self._new_maker()

    def configure(self, config: GroupingConfig) -> None:
        """Put another configuration in force; a new maker gets the groups that the previous maker held."""
        before, self._config = self._config, config
        self.untouched = False
        if (config.maker, config.seed, config.batch_bytes) != (before.maker, before.seed, before.batch_bytes):
            self._maker = self._new_maker()
            for group in self._offered:
                self._give(group)

    @property
    def latest_version_only(self) -> bool:
        """Whether older versions of an example are dropped once a newer version has sealed."""
        return self._config.drop_superseded or self._maker.latest_version_only

    def offer(self, group: Group) -> None:
        """Offer a sealed group to the maker."""
        self.untouched = False
        group.stage = Stage.OFFERED
        self._offered[group] = None
        for member in group.members.values():
            offset = member.source.offset
            if offset in self._delivered_before:
                group.fates[offset] = BATCHED
            else:
                self._held[offset] = group
        self._give(group)

    def withdraw(self, group: Group) -> None:
        """Withdraw a group that is finished, because it was either delivered or dropped."""
        self._offered.pop(group, None)
        undecided = [m.source for m in group.members.values() if self._held.pop(m.source.offset, None) is not None]
        if undecided:
            self.untouched = False
            self._maker.discard(undecided)

    def cut(self, why: Literal["size", "age", "drain"], now_ms: int) -> CutBatch | None:
        """Return the next batch, full if it is cut for "size", else full or smaller; None if none is due."""
        size = self._config.batch_rollouts if why == "size" else self._maker.held
        examples = self._maker.create_batch(size) if size else None
        if examples is None:
            self.untouched = True
            return None
        if not examples:
            raise self._broken("made an empty batch")
        groups = [self._deliver(example) for example in examples]
        size_bytes = sum(map(example_bytes, examples)) + sum(map(batch_assembly.name_bytes, dict.fromkeys(groups)))
        if size_bytes > self._config.batch_bytes:
            raise self._broken(
                f"made a batch of {size_bytes} bytes, but grouping.batch_bytes is {self._config.batch_bytes}"
            )
        finished = over_batch(examples, groups, self._plug_ins.estimators)
        rows = batch_assembly.with_equal_references(finished, self._config.batch_bytes - size_bytes)
        batch = batch_assembly.batch(
            rows,
            groups,
            partition=self._partition,
            number=self.batch_number,
            core_version=self._config.core_version,
            generation=self._config.generation,
            cut=why,
            cut_ms=now_ms,
            metadata=self._metadata(finished),
        )
        self.batch_number += 1
        self._maker.batch_number = self.batch_number
        return CutBatch(batch, groups)

    def _deliver(self, example: RLExample) -> Group:
        """Note that a batch carries an example, and return its group. A maker may change nothing but the advantage."""
        group = self._held.pop(example.source.offset, None)
        if group is None:
            raise self._broken(f"delivered {example.source}, which it does not hold")
        member = group.members.get(example.source.uid)
        rollout = member.rollout if member is not None and member.source == example.source else None
        if rollout is None or not is_of(example, rollout):
            raise self._broken(f"delivered {example.source} with other content than it was given")
        group.fates[example.source.offset] = BATCHED
        return group

    def take_discarded(self) -> list[Group]:
        """Return the groups of rollouts that the maker discarded since the last call; check that it lost none."""
        self._note_discarded()
        if self._maker.held != len(self._held):
            raise self._broken(
                f"holds {self._maker.held} rollouts, but {len(self._held)} were neither delivered nor reported"
            )
        discarded, self._discarded = self._discarded, []
        return discarded

    def _metadata(self, examples: list[RLExample]) -> str:
        """Return the maker's metadata of a batch as canonical JSON."""
        try:
            text = json.dumps(self._maker.get_batch_metadata(examples), sort_keys=True)
        except (TypeError, ValueError) as error:
            raise self._broken(f"returned metadata that is not JSON ({error})") from error
        if len(text) > _METADATA_LIMIT:
            raise self._broken(f"returned {len(text)} characters of metadata, but the limit is {_METADATA_LIMIT}")
        return text

    def partly_delivered(self) -> list[int]:
        """Return the offsets that a batch carries, although their groups are not finished."""
        return [offset for group in self._offered for offset, fate in group.fates.items() if fate == BATCHED]

    def _new_maker(self) -> BatchMaker:
        config = self._config
        context = MakerContext(partition=self._partition, seed=config.seed, batch_bytes=config.batch_bytes)
        maker = batch_maker(config.maker, context, self._plug_ins.makers)
        maker.batch_number = self.batch_number
        return maker

    def _give(self, group: Group) -> None:
        key = group.key
        sealed = SealedGroup(
            environment=key.environment,
            example_id=key.example_id,
            policy_version=key.policy_version,
            group_id=key.group_id,
            rewards=tuple(m.rollout.reward for m in group.members.values()),
            advantages=tuple(advantage.share for advantage in group.advantages.values()),
            sealed_ms=group.sealed_ms,
        )
        for member, advantage in zip(group.members.values(), sealed.advantages, strict=True):
            if member.source.offset not in group.fates:
                self._maker.add_rollout(HeldExample.of(member.rollout, member.source, advantage), sealed)
        self._note_discarded()

    def _note_discarded(self) -> None:
        """Note the rollouts that the maker discarded, before the maker is used again."""
        for source, reason in self._maker.take_discarded():
            group = self._held.pop(source.offset, None)
            if group is None or reason in ("", BATCHED):
                raise self._broken(f"discarded {source} without holding it, or for no valid reason ({reason!r})")
            group.fates[source.offset] = reason
            self._discarded.append(group)

    def _broken(self, fault: str) -> StateRefused:
        return StateRefused(
            f"batch maker {self._config.maker} {fault}; it must hold, deliver or report every rollout: fix the maker"
        )
