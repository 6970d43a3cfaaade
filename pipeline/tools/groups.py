"""`rollstream groups`: writes the groups of a run, and its training batches, to Parquet files on disk.

Fills a group store from the run's topics, from the last saved position, so that an interruption loses nothing.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollstream.consumers.buffers.groups.config import GroupStoreConfig
from rollstream.consumers.buffers.groups.view import GroupStore
from rollstream.pipeline.command_line.command_parser import set_handler
from rollstream.pipeline.command_line.plain_values import compact
from rollstream.pipeline.command_line.text_tables import table
from rollstream.pipeline.config import RunConfig
from rollstream.topics.kafka import clients

_COUNTS = ("groups", "open_groups", "open_rollouts")


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream groups`."""
    set_handler(parser, show_groups, example="rollstream groups data/groups --run main --batches", json=True)
    parser.add_argument(
        "directory", nargs="?", type=Path, metavar="DIRECTORY", help="the store (default: groups/RUN in data_dir)"
    )
    parser.add_argument("--batches", action="store_true", help="also write the run's training batches")
    parser.add_argument(
        "--policy-version",
        action="append",
        type=int,
        default=[],
        metavar="V",
        help="only rollouts of this version; may be repeated; give the same versions each time the store is filled",
    )
    parser.add_argument(
        "--compression", default="zstd", metavar="NAME", help="compression of the files (default: %(default)s)"
    )


def show_groups(config: RunConfig, args: argparse.Namespace) -> int:
    """Add new records to the store, and print its content."""
    clients.check_broker(config.kafka)
    root = Path(args.directory or config.data_dir / "groups" / config.run)
    settings = GroupStoreConfig(compression=args.compression, accept_policy_versions=tuple(args.policy_version))
    with GroupStore(root, settings) as store:
        records = store.fill(config.kafka, config.run)
        batches = store.fill(config.kafka, config.run, "batches") if args.batches else 0
        content = summary(store, config.run)
    content |= {"records": records, "batch_records": batches}
    print(compact(content) if args.json else text_of(content), flush=True)
    return 0


def summary(store: GroupStore, run: str) -> dict[str, Any]:
    """Return the content of a store for a run, as plain values for JSON."""
    stats = store.stats()
    return {
        "run": run,
        "directory": str(store.root),
        "environments": stats["environments"],
        "left_out": stats.get("unreadable", 0),
        "not_accepted": sum(counts.get("version_not_accepted", 0) for counts in stats["environments"].values()),
        "positions": {topic: dict(store.position_of(topic)) for topic in ("rollouts", "batches")},
    }


def text_of(content: Mapping[str, Any]) -> str:
    """Return the content of a store as a table."""
    rows = [(name, *(counts[key] for key in _COUNTS)) for name, counts in content["environments"].items()]
    lines = [table(("environment", "groups", "open", "rollouts in them"), rows)]
    lines.append(f"{content['records'] + content['batch_records']:,} records are new: {content['directory']}")
    if content["not_accepted"]:
        lines.append(f"{content['not_accepted']:,} rollouts of other policy versions were left out")
    if content["left_out"]:
        lines.append(f"{content['left_out']:,} invalid records were left out and logged")
    return "\n".join(lines)
