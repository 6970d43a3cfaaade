"""`rollstream groups`: the groups of a run, and its training batches, as Parquet files on disk.

Fills a store of groups from the run's topics, from where it was filled to last time: who stops it loses nothing.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from consumers.buffers.group_config import GroupStoreConfig
from consumers.buffers.group_view import GroupStore
from pipeline.config import RunConfig
from pipeline.tables import table
from pipeline.tools.plain import compact
from topics import clients

_FIGURES = ("groups", "open_groups", "open_rollouts")


def show_groups(config: RunConfig, args: argparse.Namespace) -> int:
    """Fill the store with what is new, and print what it holds."""
    clients.check_broker(config.kafka)
    root = Path(args.directory or config.data_dir / "groups" / config.run)
    settings = GroupStoreConfig(compression=args.compression, accept_policy_versions=tuple(args.policy_version))
    with GroupStore(root, settings) as store:
        records = store.fill(config.kafka, config.run)
        batches = store.fill(config.kafka, config.run, "batches") if args.batches else 0
        found = summary(store, config.run)
    found |= {"records": records, "batch_records": batches}
    print(compact(found) if args.json else text_of(found), flush=True)
    return 0


def summary(store: GroupStore, run: str) -> dict[str, Any]:
    """What a store holds of a run, as programs read it."""
    stats = store.stats()
    return {
        "run": run,
        "directory": str(store.root),
        "environments": stats["environments"],
        "left_out": stats.get("unreadable", 0),
        "positions": {topic: dict(store.position_of(topic)) for topic in ("rollouts", "batches")},
    }


def text_of(found: Mapping[str, Any]) -> str:
    """The same for people."""
    rows = [(name, *(of[figure] for figure in _FIGURES)) for name, of in found["environments"].items()]
    lines = [table(("environment", "groups", "open", "rollouts in them"), rows)]
    lines.append(f"{found['records'] + found['batch_records']:,} records are new: {found['directory']}")
    if found["left_out"]:
        lines.append(f"{found['left_out']:,} of them make no sense and were left out, as logged")
    return "\n".join(lines)
