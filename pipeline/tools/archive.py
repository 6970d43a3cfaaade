"""`rollstream archive`: copies a run's topics into Parquet files.

An archive is always complete up to the positions it names, even after a crash.
"""

import argparse
import json
import logging
import time
from collections import Counter
from typing import Any, NoReturn

from rollstream.consumers.archive import manifest as manifests
from rollstream.consumers.archive.archiver import Archiver
from rollstream.consumers.archive.manifest import ArchiveManifest
from rollstream.consumers.archive.writer import ArchiveWriter, check_arrays, check_files
from rollstream.consumers.freed_memory import use_c_library_for_arrow
from rollstream.pipeline.command_line.command_parser import set_handler, wait_seconds
from rollstream.pipeline.command_line.plain_values import tell
from rollstream.pipeline.command_line.text_tables import bytes_text, table
from rollstream.pipeline.config import RunConfig
from rollstream.topics.errors import AccessDenied, BrokerUnavailable, DeadlineExceeded
from rollstream.topics.files.atomic_files import StoreError
from rollstream.topics.files.stores import Store, open_store
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)


def place_of(config: RunConfig, given: str | None) -> str:
    """Return the path or URL of the archive: the one given, or the default below data_dir."""
    return given or str(config.data_dir / "archive")


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream archive`."""
    set_handler(parser, show_archive, example="rollstream archive s3://bucket/runs --run main --follow", json=True)
    parser.add_argument(
        "archive",
        nargs="?",
        metavar="ARCHIVE",
        help="a directory, or a URL that fsspec supports (default: archive in data_dir)",
    )
    parser.add_argument("--follow", action="store_true", help="go on until interrupted")
    parser.add_argument(
        "--every", type=wait_seconds, default=10.0, metavar="S", help="seconds between two reads (default: %(default)g)"
    )
    parser.add_argument("--arrays", action="store_true", help="also write tokens, masks and logprobs as columns")
    parser.add_argument("--compact", action="store_true", help="merge small files instead, without reading topics")
    parser.add_argument("--check", action="store_true", help="read every file again instead, and compare digests")


def show_archive(config: RunConfig, args: argparse.Namespace) -> int:
    """Archive new records, repeatedly with --follow until interrupted; or compact or check the archive."""
    store = open_store(place_of(config, args.archive))
    if args.check:
        current = check_files(store, manifests.existing(store, config.run))
        print_summary(store, current, args.json, checked=len(current.files), arrays=check_arrays(store, current))
        return 0
    if args.compact:
        manifests.existing(store, config.run)
        writer = ArchiveWriter(store, config.run)
        fewer = writer.compact()
        writer.close()
        print_summary(store, writer.manifest, args.json, fewer=fewer)
        return 0
    if args.follow:
        follow(config, store, args)
    with Archiver(config.kafka, config.run, store, arrays=args.arrays) as archiver:
        result = archiver.once()
        print_summary(store, result.manifest, args.json, records=result.records)
        tell(archiver.writer.skipped)
    return 0


def follow(config: RunConfig, store: Store, args: argparse.Namespace) -> NoReturn:
    """Archive new records until interrupted; once the archive is open, outages of brokers and store are waited out."""
    use_c_library_for_arrow()
    begun = False
    while True:
        try:
            # A new archiver begins where the newest manifest ends, as after a kill.
            with Archiver(config.kafka, config.run, store, arrays=args.arrays) as archiver:
                begun = True
                while True:
                    result = archiver.once()
                    if result.records:
                        print_summary(store, result.manifest, args.json, records=result.records)
                    time.sleep(args.every)
        except (BrokerUnavailable, DeadlineExceeded, StoreError) as error:
            if not begun or isinstance(error, AccessDenied):
                raise
            event(logger, "not_archived", level=logging.WARNING, error=str(error), again_in_s=args.every)
            time.sleep(args.every)


def summary(store: Store, current: ArchiveManifest, **more: int) -> dict[str, Any]:
    """Content of an archive of a run, as plain values for JSON."""
    rows, files, sizes = Counter[str](), Counter[str](), Counter[str]()
    for file in current.files:
        rows[file.table] += file.rows
        files[file.table] += 1
        sizes[file.table] += file.size_bytes
    tables = {n: {"rows": rows[n], "files": files[n], "bytes": sizes[n]} for n in sorted(rows)}
    positions = {name: dict(topic.position) for name, topic in current.topics.items()}
    head = {"archive": store.url, "run": current.run, "generation": current.generation}
    return {**head, **more, "tables": tables, "positions": positions}


_RESULTS = {
    "records": "{:,} records are new",
    "fewer": "{:,} fewer files",
    "checked": "{:,} files match the manifest",
    "arrays": "{:,} stored arrays match their digests",
}


def print_summary(store: Store, current: ArchiveManifest, as_json: bool, **more: int) -> None:
    """Print the content of an archive, and what was done to it."""
    content = summary(store, current, **more)
    if as_json:
        print(json.dumps(content), flush=True)
        return
    rows = [(name, t["rows"], t["files"], bytes_text(t["bytes"])) for name, t in content["tables"].items()]
    print(table(("table", "rows", "files", "size"), rows))
    results = "; ".join(_RESULTS[name].format(value) for name, value in more.items())
    print(f"{results}: {content['archive']}, run {current.run}, generation {current.generation}", flush=True)
