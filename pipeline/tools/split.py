"""`rollstream split`: continues a run as another run with a different number of partitions.

If it is killed, run it again: it goes on from its records on the log.
"""

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rollstream.pipeline.command_parser import set_handler
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.run import plan as plans
from rollstream.pipeline.split import closing, learners, moving
from rollstream.pipeline.split.records import withdraw, write_to_predecessor, write_to_successor
from rollstream.pipeline.tools.plain_values import compact
from rollstream.topics.catalogue import topic_name
from rollstream.topics.config import TopicsConfig
from rollstream.topics.errors import ConfigurationError, RollstreamError
from rollstream.topics.kafka import clients, provisioning, topic_admin
from rollstream.topics.records import RunSplit
from rollstream.topics.run_splits import splits_of


@dataclass(frozen=True, kw_only=True)
class SplitResult:
    """Outcome of a split."""

    split: RunSplit
    moved: int
    """Records that this call moved."""
    positions: Mapping[str, int]
    """Position of each learner in the index of the successor."""
    policy_version: int
    """The newest policy version, which was carried over; -1 if there is none."""
    configuration: str
    """File with the configuration of the successor."""

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON."""
        return {
            "run": self.split.run,
            "successor": self.split.successor,
            "partitions": self.split.partitions,
            "moved": self.moved,
            "batches_carried": self.split.carried,
            "positions": dict(self.positions),
            "policy_version": self.policy_version,
            "configuration": self.configuration,
        }


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream split`."""
    set_handler(
        parser, show_split, example="rollstream split --config run.toml --into main-7 --partitions 7", json=True
    )
    parser.add_argument("--into", required=True, metavar="RUN", help="the successor, whose topics are created")
    parser.add_argument("--partitions", type=int, required=True, metavar="N", help="number of its partitions")
    parser.add_argument(
        "--wait",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="longest time for each wait of the split, such as for roles of the run to end (default: 120)",
    )
    parser.add_argument(
        "--without-checkpoints",
        action="store_true",
        help="copy no checkpoints, because the learners keep their positions themselves, as other trainers do",
    )


def show_split(config: RunConfig, args: argparse.Namespace) -> int:
    """Split the run, and print what was moved and how to start the successor."""
    result = split_run(
        config, args.into, args.partitions, wait_s=args.wait, with_checkpoints=not args.without_checkpoints
    )
    if args.json:
        print(compact(result.as_dict()), flush=True)
        return 0
    split = result.split
    lines = [
        f"run {split.run} goes on as run {split.successor}, with {split.partitions} partitions",
        f"moved {result.moved:,} records without a batch, carried over {split.carried:,} batches not yet trained on",
    ]
    if result.policy_version >= 0:
        lines.append(f"policy version {result.policy_version} is the first of run {split.successor}")
    lines += [
        f"learner {name} reads its index from offset {position}" for name, position in sorted(result.positions.items())
    ]
    lines += [f"configuration: {result.configuration}", "", "start its roles with:"]
    lines.append(f"  rollstream run --config {result.configuration}")
    print("\n".join(lines), flush=True)
    return 0


def split_run(
    config: RunConfig, into: str, partitions: int, *, wait_s: float, with_checkpoints: bool = True
) -> SplitResult:
    """Continue a run as `into` with a different number of partitions; safe to repeat after any failure.

    Raises ConfigurationError if the successor's name or number of partitions is not possible. Raises StateRefused,
    DeadlineExceeded and others if the run cannot be closed; the run is then open again. Raises StateRefused if the run
    was opened while its records were moved; a repeated call closes it again.
    """
    clients.check_broker(config.kafka)
    count = topic_admin.partitions_of(config.kafka, topic_name(config.run, "rollouts"))
    split = _begun(config, into, partitions, count)
    # The run's topics on the broker decide the number of partitions, not the configuration.
    config = replace(config, topics=replace(config.topics, partitions=count))
    after = successor_config(config, into, partitions)
    if split.phase == "moved":
        write_to_successor(config.kafka, split)  # an earlier call may have been killed just before this
        known = str(after.run_dir / "run.toml")
        return SplitResult(split=split, moved=0, positions={}, policy_version=-1, configuration=known)
    if split.phase == "closing":
        carried = _close(config, split, wait_s, with_checkpoints=with_checkpoints)
        split = replace(split, phase="moving", wall_time=time.time())
        write_to_predecessor(config.kafka, split)
    else:
        closing.close_again(config)
        carried = learners.stopped_learners(config, wait_s, with_checkpoints=with_checkpoints)
    moving.create(config, after, split)
    moved = moving.move_rollouts(config, after)
    after = replace(after, grouping=moving.exclude_copies(config, after))
    placed = moving.carry_batches(config, after, split, learners.first_needed(config, carried), wait_s)
    positions = learners.carry_checkpoints(config, after, placed, carried)
    version = learners.carry_weights(config, after)
    moving.copy_decisions(config, after)
    # On a cluster, an operator may set the topic back to the settings that it knows at any time.
    closing.check_closed(config)
    path = plans.write(after)
    ended = replace(placed, phase="moved", wall_time=time.time())
    # The successor is opened last.
    write_to_predecessor(config.kafka, ended)
    write_to_successor(config.kafka, ended)
    return SplitResult(split=ended, moved=moved, positions=positions, policy_version=version, configuration=str(path))


def successor_config(config: RunConfig, into: str, partitions: int) -> RunConfig:
    """Return the successor's configuration: that of the run that ends, with the successor's name and directories."""
    topics: TopicsConfig = replace(config.topics, partitions=partitions)
    after = replace(config, run=into, topics=topics, learner=replace(config.learner, input_run=""))
    if config.learner.checkpoint.directory == str(config.run_dir / "checkpoints"):
        checkpoint = replace(after.learner.checkpoint, directory=str(after.run_dir / "checkpoints"))
        after = replace(after, learner=replace(after.learner, checkpoint=checkpoint))
    return replace(after, grouping=moving.configuration_after(config))


def _begun(config: RunConfig, into: str, partitions: int, count: int) -> RunSplit:
    """Return the split on record, or begin a new split. Raises ConfigurationError if the run cannot go on as `into`."""
    known = splits_of(config.kafka, config.run).successor
    if known is not None:
        if (known.successor, known.partitions) != (into, partitions):
            raise ConfigurationError(
                f"run {config.run} is split already: use --into {known.successor} --partitions {known.partitions}"
            )
        return known
    if into == config.run or partitions < 1 or partitions == count:
        raise ConfigurationError(
            f"run {config.run} has {count} partitions and cannot go on as {into} with {partitions}; name another run, "
            f"and a different number of partitions, at least 1"
        )
    if provisioning.describe(config.kafka, into):
        raise ConfigurationError(f"run {into} has topics already; name a run that has none")
    closing.check_movable(config)
    learners.check_buffers(config)
    split = RunSplit(run=config.run, successor=into, partitions=partitions, phase="closing", wall_time=time.time())
    write_to_predecessor(config.kafka, split)
    return split


def _close(
    config: RunConfig, split: RunSplit, wait_s: float, *, with_checkpoints: bool
) -> list[learners.CarriedLearner]:
    """Close the run; if that fails, open it again."""
    try:
        closing.close(config, wait_s)
        carried = learners.stopped_learners(config, wait_s, with_checkpoints=with_checkpoints)
        learners.check_buffers(config)
        return carried
    except RollstreamError:
        closing.reopen(config)
        withdraw(config.kafka, split)
        raise
