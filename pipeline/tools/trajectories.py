"""`rollstream trajectories`: shows, merges and splits saved trajectory buffers.

Files are linked if the file system allows it, else copied; sources stay unchanged. No topic is read.
"""

import argparse
import json
import sys
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

from rollstream.consumers.buffers.storage.segments import layout_of, refuse_other
from rollstream.consumers.buffers.trajectories.checkpoint import read_checkpoint, shard, write_checkpoint
from rollstream.consumers.buffers.trajectories.folder import SavedCheckpoint
from rollstream.consumers.buffers.trajectories.formats import DEFAULT, Format, format_named
from rollstream.consumers.buffers.trajectories.index import TrajectoryIndex
from rollstream.consumers.buffers.trajectories.journal import JournalContent
from rollstream.pipeline.command_line.command_parser import add_command, set_handler
from rollstream.pipeline.command_line.text_tables import bytes_text, table
from rollstream.pipeline.config import RunConfig
from rollstream.topics.errors import ConfigurationError, RecordError
from rollstream.topics.files.atomic_files import StoreError

_SHOWN = 5
"""Number of missing ranks that an error names."""


def register(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `rollstream trajectories`."""
    actions = parser.add_subparsers(dest="action", metavar="COMMAND", required=True)
    showing = add_command(actions, "show", "show the content of a directory of trajectories")
    set_handler(showing, show, example="rollstream trajectories show checkpoints/100", json=True)
    showing.add_argument(
        "directory", type=Path, metavar="DIRECTORY", help="a checkpoint, or the directory to which a buffer saves"
    )
    showing.add_argument("--check", action="store_true", help="read every file, and compare checksums if it has any")
    merging = add_command(actions, "merge", "merge several checkpoints into one; trajectories get new ids")
    set_handler(
        merging, merge, example="rollstream trajectories merge checkpoints/100 --into checkpoints/whole", json=True
    )
    merging.add_argument(
        "source", nargs="+", type=Path, metavar="SOURCE", help="a checkpoint, or a directory of rank_0, rank_1, ..."
    )
    merging.add_argument("--into", type=Path, required=True, metavar="DIRECTORY", help="a new directory")
    splitting = add_command(actions, "split", "split a checkpoint into several, or copy its oldest trajectories")
    set_handler(
        splitting,
        split,
        example="rollstream trajectories split checkpoints/whole --into checkpoints/100 --parts 4",
        json=True,
    )
    splitting.add_argument("source", type=Path, metavar="SOURCE", help="a checkpoint")
    splitting.add_argument("--into", type=Path, required=True, metavar="DIRECTORY", help="a new directory")
    how = splitting.add_mutually_exclusive_group(required=True)
    how.add_argument("--parts", type=int, metavar="N", help="write rank_0 to rank_N-1, as N ranks would load them")
    how.add_argument("--first", type=int, metavar="N", help="write the N oldest trajectories")
    for command in (showing, merging, splitting):
        command.add_argument(
            "--allow-pickle",
            action="store_true",
            help="load pkl files, which can execute any code that their writer put into them",
        )


def show(_: RunConfig, args: argparse.Namespace) -> int:
    """Print the content of a directory; return 1 if --check finds damaged files."""
    checkpoint = _read(args.directory, args)
    damaged = _damaged(checkpoint) if args.check else []
    summary = {**_summary(checkpoint), **({"damaged": damaged} if args.check else {})}
    print(json.dumps(summary) if args.json else _text(summary))
    for line in damaged:
        print(line, file=sys.stderr)
    return 1 if damaged else 0


def merge(_: RunConfig, args: argparse.Namespace) -> int:
    """Write one checkpoint with the trajectories of several, ordered by id, then by source."""
    _refuse_full(args.into)
    sources = [_read(directory, args) for source in args.source for directory in _ranks(source)]
    places = sorted(
        (source.content[place].trajectory_id, number, place)
        for number, source in enumerate(sources)
        for place in range(len(source.content))
    )
    index, paths = TrajectoryIndex(), []
    layout = next((source.content.layout for source in sources if len(source.content)), ())
    for _id, number, place in places:
        source = sources[number]
        entry = source.content[place]
        refuse_other(layout, source.content.layout, str(source.directory))
        index.append(entry.uuid, entry.description, entry.size_bytes)
        paths.append(source.path(entry))
    position, parted = _position(sources)
    content = replace(JournalContent.of(index, layout), position=position, seed=sources[0].content.seed)
    write_checkpoint(args.into, content, paths.__getitem__, sources[0].formats, DEFAULT)
    summary = {**_summary(_read(args.into, args)), "merged": len(sources)}
    print(json.dumps(summary) if args.json else _text(summary))
    if parted:
        print(
            f"the checkpoint has no position, because its sources end at different offsets of partition {parted[0]}; "
            "do not fill it further from the log",
            file=sys.stderr,
        )
    return 0


def split(_: RunConfig, args: argparse.Namespace) -> int:
    """Write the shares of several ranks, or only the oldest trajectories."""
    _refuse_full(args.into)
    source = _read(args.source, args)
    held = len(source.content)
    if args.first is None:
        if args.parts < 1:
            raise ConfigurationError(f"--parts {args.parts}; give at least 1")
        parts = [(args.into / f"rank_{rank}", shard(source, rank, args.parts)) for rank in range(args.parts)]
    else:
        if not 1 <= args.first <= held:
            raise ConfigurationError(f"--first {args.first}: {args.source} holds {held}; give 1 to {held}")
        # The source's position is past the trajectories left out, so the part gets no position to be filled from.
        content = replace(shard(source, 0, 1).content.part(0, args.first), position={})
        parts = [
            (args.into, source._replace(content=replace(content, counter=content[args.first - 1].trajectory_id + 1)))
        ]
    summaries = []
    for directory, part in parts:
        paths = [part.path(part.content[place]) for place in range(len(part.content))]
        write_checkpoint(directory, part.content, paths.__getitem__, part.formats, DEFAULT)
        summaries.append(_summary(part._replace(directory=directory)))
    rows = [(part["directory"], part["trajectories"], part["samples"]) for part in summaries]
    print(json.dumps(summaries) if args.json else table(("directory", "trajectories", "samples"), rows))
    return 0


def _read(directory: Path, args: argparse.Namespace) -> SavedCheckpoint:
    def formats(name: str) -> Format:
        try:
            return format_named(name, allow_pickle=args.allow_pickle)
        except ConfigurationError as error:
            message = str(error).replace("allow_pickle=True", "--allow-pickle")
            raise ConfigurationError(f"{directory}: {message}") from error

    return read_checkpoint(directory, formats)


def _ranks(source: Path) -> list[Path]:
    """Return the rank directories of a source in order of rank, or the source itself if it has none.

    Raises ConfigurationError if a rank is missing: its trajectories would be lost without a word.
    """
    named = [path for path in source.glob("rank_*") if path.is_dir() and path.name[5:].isdecimal()]
    ranks = {int(path.name[5:]) for path in named}
    missing = max(ranks, default=-1) + 1 - len(ranks)
    if missing:
        names = [f"rank_{rank}" for rank in islice((r for r in count() if r not in ranks), min(missing, _SHOWN))]
        more = f" and {missing - _SHOWN:,} more" if missing > _SHOWN else ""
        raise ConfigurationError(
            f"{source} has no {', '.join(names)}{more}, but {len(ranks)} others up to rank_{max(ranks)}; copy the rest "
            "there, or name each directory to merge without it"
        )
    return sorted(named, key=lambda path: int(path.name[5:])) or [source]


def _refuse_full(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise ConfigurationError(f"{directory} is a file; give a new directory")
    if directory.exists() and any(directory.iterdir()):
        raise ConfigurationError(f"{directory} is not empty; give a new directory")


def _position(sources: Sequence[SavedCheckpoint]) -> tuple[dict[int, int], list[int]]:
    """Return the common position of the sources, empty if they disagree, and the partitions on which they disagree."""
    position: dict[int, int] = {}
    parted = set()
    for source in sources:
        for partition, offset in source.content.position.items():
            if position.setdefault(partition, offset) != offset:
                parted.add(partition)
    return ({} if parted else position), sorted(parted)


def _damaged(checkpoint: SavedCheckpoint) -> list[str]:
    """Describe each damaged file."""
    problems = []
    for place in range(len(checkpoint.content)):
        entry = checkpoint.content[place]
        path = checkpoint.path(entry)
        try:
            arrays = checkpoint.formats(entry.description.format).arrays(path)
            refuse_other(checkpoint.content.layout, layout_of(arrays, 2), str(path))
            if path.suffix in (".npz", ".pt"):
                with zipfile.ZipFile(path) as file:
                    if wrong := file.testzip():
                        problems.append(f"{path}: {wrong} is damaged")
        except FileNotFoundError:
            problems.append(f"{path} is missing")
        except (StoreError, RecordError, zipfile.BadZipFile) as error:
            problems.append(str(error))
    return problems


def _summary(checkpoint: SavedCheckpoint) -> dict[str, Any]:
    content = checkpoint.content
    descriptions = [content.descriptions[number] for number in content.entries["description"]]
    return {
        "directory": str(checkpoint.directory),
        "trajectories": len(content),
        "samples": sum(description.samples for description in descriptions),
        "bytes": int(content.entries["size_bytes"].sum()),
        "first_id": int(content.entries["id"][0]) if len(content) else None,
        "next_id": content.counter,
        "formats": dict(Counter(description.format for description in descriptions)),
        "environments": dict(Counter(description.environment for description in descriptions)),
        "model_weights_ids": len({description.model_weights_id for description in descriptions}),
        "seed": content.seed,
        "draws": content.draws,
        "position": {str(partition): offset for partition, offset in content.position.items()},
        "arrays": {leaf.path: {"dtype": leaf.dtype, "shape": list(leaf.shape)} for leaf in content.layout},
    }


def _text(summary: dict[str, Any]) -> str:
    position = ", ".join(f"{partition}:{offset}" for partition, offset in summary["position"].items())
    lines = [
        f"{summary['directory']}: {summary['trajectories']:,} trajectories, {summary['samples']:,} samples, "
        f"{bytes_text(summary['bytes'])}",
        f"ids {summary['first_id']} to {summary['next_id'] - 1}"
        if summary["trajectories"]
        else f"next id {summary['next_id']}",
        f"formats {summary['formats']}; {summary['model_weights_ids']} ids of weights; seed {summary['seed']}, "
        f"{summary['draws']} draws",
        f"filled from the log to {position}" if position else "not filled from the log",
    ]
    rows = [(path, leaf["dtype"], str(leaf["shape"])) for path, leaf in summary["arrays"].items()]
    return "\n".join([*lines, "", table(("array", "dtype", "shape of a row"), rows)])
