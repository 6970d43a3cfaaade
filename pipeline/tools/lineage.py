"""`rollstream lineage`: shows the origin and the fate of a rollout, batch, step or policy version as a tree."""

import argparse

from rollstream.pipeline.command_line.command_parser import set_handler
from rollstream.pipeline.command_line.plain_values import compact, tell
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.index.indexed_run import IndexedRun, indexed_run
from rollstream.pipeline.index.lineage import (
    LineageNode,
    batch_lineage,
    parse_place,
    policy_lineage,
    record_lineage,
    rollout_places,
    step_lineage,
)
from rollstream.topics.errors import TopicError


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream lineage`."""
    set_handler(parser, lineage, example="rollstream lineage --run main --batch 0-17", json=True)
    subject = parser.add_mutually_exclusive_group(required=True)
    subject.add_argument("--rollout", metavar="UID", help="a rollout, by its uid")
    subject.add_argument("--offset", metavar="P:O", help="a record of rollouts, by partition and offset")
    subject.add_argument("--batch", metavar="ID", help="a batch")
    subject.add_argument("--step", type=int, metavar="N", help="a learner's step")
    subject.add_argument("--policy", type=int, metavar="V", help="a policy version")


def lineage(config: RunConfig, args: argparse.Namespace) -> int:
    """Print the trees of the records that the flags name."""
    with indexed_run(config) as view:
        trees = lineage_trees(view, args)
        if args.json:
            print(compact([tree.as_dict() for tree in trees]))
        else:
            print("\n\n".join("\n".join(tree.lines()) for tree in trees))
        tell(view.skipped)
        return 0


def lineage_trees(view: IndexedRun, args: argparse.Namespace) -> list[LineageNode]:
    """Return the trees of the records that the flags name. Raises TopicError if a record does not exist."""
    if args.rollout is not None:
        return [record_lineage(view, place) for place in rollout_places(view, args.rollout)]
    if args.offset is not None:
        return [record_lineage(view, parse_place(args.offset))]
    if args.batch is not None:
        return [batch_lineage(view, view.batch(args.batch))]
    if args.step is not None:
        steps = view.steps_numbered(args.step)
        if not steps:
            raise TopicError(f"run {view.run} has no step {args.step}; `rollstream cat steps` lists them")
        return [step_lineage(view, step) for step in steps]
    manifest = view.policy(args.policy)
    if manifest is None:
        raise TopicError(f"run {view.run} has no policy version {args.policy}; `rollstream cat policies` lists them")
    return [policy_lineage(view, manifest)]
