"""From sealed groups to batches: what is with the batch maker, and a check that no rollout is lost in it.

Every rollout offered is held by the maker, delivered in a batch, or reported as thrown away; anything else is an error.
"""

import json
from collections.abc import Mapping
from typing import Literal, NamedTuple

from consumers.grouping import assemble
from consumers.grouping.advantages import over_batch
from consumers.grouping.batch_maker import BatchMaker, MakerContext, SealedGroup, example_bytes
from consumers.grouping.changes import BATCHED
from consumers.grouping.config import GroupingConfig
from consumers.grouping.groups import Group, Stage
from consumers.grouping.makers import MakerFactory, batch_maker
from topics.errors import StateRefused
from topics.examples import RLExample
from topics.records import TrainingBatch

_METADATA_LIMIT = 4096
"""Characters of metadata, all ASCII: what a batch may take besides the rows that grouping.batch_bytes counts."""


class Delivered(NamedTuple):
    """A batch, and the groups its rows are of."""

    batch: TrainingBatch
    groups: list[Group]


class Delivery:
    """The batch maker of one partition and the groups it was given."""

    def __init__(
        self,
        partition: int,
        batch_number: int,
        delivered_before: frozenset[int],
        config: GroupingConfig,
        makers: Mapping[str, MakerFactory],
    ) -> None:
        """`delivered_before` are offsets a batch already carries though their groups are not over."""
        self.batch_number = batch_number
        self._partition = partition
        self._delivered_before = delivered_before
        self._makers = makers
        self._config = config
        self._untouched = True
        """Whether the maker had no batch to make, and holds the same since."""
        self._offered: dict[Group, None] = {}
        self._held: dict[int, Group] = {}
        self._discarded: list[Group] = []
        self._maker = self._make()

    def configure(self, config: GroupingConfig) -> None:
        """Go on under another configuration; another maker is given what the last one held."""
        before, self._config = self._config, config
        self._untouched = False
        if (config.maker, config.seed, config.batch_bytes) != (before.maker, before.seed, before.batch_bytes):
            self._maker = self._make()
            for group in self._offered:
                self._give(group)

    @property
    def latest_version_only(self) -> bool:
        """Whether older versions of an example go once a newer one sealed."""
        return self._config.drop_superseded or self._maker.latest_version_only

    def offer(self, group: Group) -> None:
        """A sealed group is ready for a batch."""
        self._untouched = False
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
        """The group is over, by delivery or because it was dropped."""
        self._offered.pop(group, None)
        undecided = [m.source for m in group.members.values() if self._held.pop(m.source.offset, None) is not None]
        if undecided:
            self._untouched = False
            self._maker.discard(undecided)

    def cut(self, why: Literal["size", "age", "drain"], now_ms: int) -> Delivered | None:
        """The next batch: a full one for "size", of whatever is held otherwise; None when it is not time for one."""
        if why == "size" and self._untouched:
            return None
        size = self._config.batch_rollouts if why == "size" else self._maker.held
        examples = self._maker.create_batch(size) if size else None
        if examples is None:
            self._untouched = True
            return None
        if not examples:
            raise self._broken("made a batch of nothing")
        groups = [self._deliver(example) for example in examples]
        most = sum(map(example_bytes, examples)) + sum(map(assemble.name_bytes, dict.fromkeys(groups)))
        if most > self._config.batch_bytes:
            raise self._broken(f"made a batch of {most} bytes, grouping.batch_bytes is {self._config.batch_bytes}")
        finished = over_batch(examples, groups)
        batch = assemble.batch(
            finished,
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
        return Delivered(batch, groups)

    def _deliver(self, example: RLExample) -> Group:
        """Note that a batch carries an example; returns its group. Only an advantage may be another than was given."""
        group = self._held.pop(example.source.offset, None)
        if group is None:
            raise self._broken(f"delivered {example.source}, which it does not hold")
        member = group.members.get(example.source.uid)
        rollout = member.rollout if member is not None and member.source == example.source else None
        if (
            rollout is None
            or example.tokens is not rollout.tokens
            or example.loss_mask is not rollout.loss_mask
            or example.generator_log_probs is not rollout.logprobs
            or example.advantage.shape != rollout.tokens.shape
        ):
            raise self._broken(f"delivered {example.source} otherwise than it was given it")
        group.fates[example.source.offset] = BATCHED
        return group

    def take_discarded(self) -> list[Group]:
        """Groups of which the maker threw rollouts away since the last call; checks that it lost none."""
        self._settle()
        if self._maker.held != len(self._held):
            raise self._broken(
                f"holds {self._maker.held} rollouts of {len(self._held)} it neither delivered nor reported"
            )
        discarded, self._discarded = self._discarded, []
        return discarded

    def _metadata(self, examples: list[RLExample]) -> str:
        """What the maker says of a batch, as canonical JSON."""
        try:
            text = json.dumps(self._maker.get_batch_metadata(examples), sort_keys=True)
        except (TypeError, ValueError) as error:
            raise self._broken(f"said of a batch what is no JSON ({error})") from error
        if len(text) > _METADATA_LIMIT:
            raise self._broken(f"said {len(text)} characters of a batch, of which {_METADATA_LIMIT} fit")
        return text

    def partly_delivered(self) -> list[int]:
        """Offsets a batch carries of groups that are not over."""
        return [offset for group in self._offered for offset, fate in group.fates.items() if fate == BATCHED]

    def _make(self) -> BatchMaker:
        config = self._config
        context = MakerContext(partition=self._partition, seed=config.seed, batch_bytes=config.batch_bytes)
        maker = batch_maker(config.maker, context, self._makers)
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
            advantages=tuple(worth.share for worth in group.worths.values()),
            sealed_ms=group.sealed_ms,
        )
        for member, advantage in zip(group.members.values(), sealed.advantages, strict=True):
            if member.source.offset not in group.fates:
                self._maker.add_rollout(assemble.example(member, advantage), sealed)
        self._settle()

    def _settle(self) -> None:
        """Note what the maker threw away, before anything else happens to it."""
        for source, reason in self._maker.take_discarded():
            group = self._held.pop(source.offset, None)
            if group is None or reason in ("", BATCHED):
                raise self._broken(f"threw {source} away as {reason!r}; it must hold it, and have a reason")
            group.fates[source.offset] = reason
            self._discarded.append(group)

    def _broken(self, what: str) -> StateRefused:
        return StateRefused(
            f"batch maker {self._config.maker} {what}; every rollout is held, delivered or reported: mend the maker"
        )
