"""`rollstream archive` and `rollstream restore`: a run's topics as Parquet files, and topics from them.

An archive is complete up to the positions it names, at any moment, whatever was killed when.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from consumers.archive import manifest as manifests
from consumers.archive.archiver import Archiver
from consumers.archive.manifest import Manifest
from consumers.archive.restorer import restore
from consumers.archive.store import Store, open_store
from consumers.archive.writer import ArchiveWriter, check_files
from pipeline.config import RunConfig
from pipeline.progress import progress
from pipeline.tables import bytes_text, table
from pipeline.tools.plain import tell
from topics.errors import ConfigurationError


def place_of(config: RunConfig, given: str | None) -> str:
    """Where the archive lies: what was given, or its usual place below data_dir."""
    return given or str(config.data_dir / "archive")


def show_archive(config: RunConfig, args: argparse.Namespace) -> int:
    """Archive what is new, again and again with --follow until interrupted; or compact or check what there is."""
    store = open_store(place_of(config, args.archive))
    if args.check:
        current = _current(store, config.run)
        print_summary(store, current, args.json, checked=check_files(store, current.files))
        return 0
    if args.compact:
        _current(store, config.run)
        writer = ArchiveWriter(store, config.run)
        fewer = writer.compact()
        writer.close()
        print_summary(store, writer.manifest, args.json, fewer=fewer)
        return 0
    with Archiver(config.kafka, config.run, store, arrays=args.arrays) as archiver:
        while True:
            done = archiver.once()
            if done.records or not args.follow:
                print_summary(store, done.manifest, args.json, records=done.records)
            if not args.follow:
                tell(archiver.writer.skipped)
                return 0
            time.sleep(args.every)


def _current(store: Store, run: str) -> Manifest:
    current = manifests.newest(store, run)
    if current is None:
        held = ", ".join(manifests.runs_of(store)) or "none"
        raise ConfigurationError(f"{store.url} holds no archive of run {run}; runs there: {held}")
    return current


def summary(store: Store, current: Manifest, **more: int) -> dict[str, Any]:
    """What an archive of a run holds, as programs read it."""
    rows, files, sizes = Counter[str](), Counter[str](), Counter[str]()
    for file in current.files:
        rows[file.table] += file.rows
        files[file.table] += 1
        sizes[file.table] += file.size_bytes
    tables = {n: {"rows": rows[n], "files": files[n], "bytes": sizes[n]} for n in sorted(rows)}
    positions = {name: dict(topic.position) for name, topic in current.topics.items()}
    head = {"archive": store.url, "run": current.run, "generation": current.generation}
    return {**head, **more, "tables": tables, "positions": positions}


_SAID = {
    "records": "{:,} records are new",
    "fewer": "{:,} files fewer",
    "checked": "{:,} files are what the manifest says",
}


def print_summary(store: Store, current: Manifest, as_json: bool, **more: int) -> None:
    """Print what an archive holds, and what was done to it."""
    found = summary(store, current, **more)
    if as_json:
        print(json.dumps(found), flush=True)
        return
    rows = [(name, of["rows"], of["files"], bytes_text(of["bytes"])) for name, of in found["tables"].items()]
    print(table(("table", "rows", "files", "size"), rows))
    said = "; ".join(_SAID[name].format(value) for name, value in more.items())
    print(f"{said}: {found['archive']}, run {current.run}, generation {current.generation}", flush=True)


def show_restore(config: RunConfig, args: argparse.Namespace) -> int:
    """Fill the topics of a new run from an archive."""
    store = open_store(args.archive)
    current = _current(store, config.run)
    began = time.monotonic()
    with progress("records") as show:
        records = restore(config.kafka, config.topics, store, current, args.into, show)
    found: Mapping[str, Any] = {
        "archive": store.url,
        "run": args.into,
        "archived": config.run,
        "records": records,
        "seconds": round(time.monotonic() - began, 3),
        "partitions": len(current.topics["rollouts"].position),
    }
    if args.json:
        print(json.dumps(found), flush=True)
    else:
        print(
            f"{records:,} records of run {config.run} are topics of run {args.into} now, {found['seconds']:.1f} s; "
            f"ask: rollstream verify --run {args.into}; group further: rollstream group adopt --run {args.into}",
            flush=True,
        )
    return 0
