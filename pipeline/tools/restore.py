"""`rollstream restore`: fills the topics of a new run from an archive."""

import argparse
import json
import time
from collections.abc import Mapping
from typing import Any

from rollstream.consumers.archive import manifest as manifests
from rollstream.consumers.archive.restorer import restore
from rollstream.pipeline.command_line.command_parser import set_handler
from rollstream.pipeline.command_line.progress_bar import progress
from rollstream.pipeline.config import RunConfig
from rollstream.topics.files.stores import open_store


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream restore`."""
    set_handler(
        parser, show_restore, example="rollstream restore .rollstream/archive --run main --into again", json=True
    )
    parser.add_argument("archive", metavar="ARCHIVE", help="path or URL of the archive; --run names a run in it")
    parser.add_argument(
        "--incomplete",
        action="store_true",
        help="restore an archive whose last pass was cut short; the ledger of the run then names what it lacks",
    )
    parser.add_argument("--into", required=True, metavar="RUN", help="the run whose topics are created")


def show_restore(config: RunConfig, args: argparse.Namespace) -> int:
    """Fill the topics of a new run from an archive."""
    store = open_store(args.archive)
    current = manifests.existing(store, config.run)
    began = time.monotonic()
    with progress("records") as show:
        records = restore(config.kafka, config.topics, store, current, args.into, show, incomplete=args.incomplete)
    result: Mapping[str, Any] = {
        "archive": store.url,
        "run": args.into,
        "archived": config.run,
        "records": records,
        "seconds": round(time.monotonic() - began, 3),
        "partitions": len(current.topics["rollouts"].position),
    }
    if args.json:
        print(json.dumps(result), flush=True)
    else:
        print(
            f"{records:,} records of run {config.run} restored into run {args.into} in {result['seconds']:.1f} s; "
            f"check: rollstream verify --run {args.into}; group further: rollstream role group adopt --run {args.into}",
            flush=True,
        )
    return 0
