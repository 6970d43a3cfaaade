"""`rollstream trajectories`: what a saved trajectory buffer holds; several as one, one as several.

Files are linked where the file system can, and copied else; the sources stay as they are. No topic is read.
"""

import argparse
import json
import sys
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from consumers.buffers.files import StoreError
from consumers.buffers.trajectory_checkpoint import read_checkpoint, shard, write_checkpoint
from consumers.buffers.trajectory_folder import Found
from consumers.buffers.trajectory_formats import DEFAULT, Format, format_named
from consumers.buffers.trajectory_index import TrajectoryIndex
from consumers.buffers.trajectory_journal import Content
from consumers.buffers.trajectory_rows import layout_of, refuse_other
from pipeline.config import RunConfig
from pipeline.tables import bytes_text, table
from topics.errors import ConfigurationError, RecordError


def show(_: RunConfig, args: argparse.Namespace) -> int:
    """Print what a directory holds; 1 where --check finds files that are not as they were."""
    found = _read(args.directory, args)
    damaged = _damaged(found) if args.check else []
    told = {**_told(found), **({"damaged": damaged} if args.check else {})}
    print(json.dumps(told) if args.json else _text(told))
    for line in damaged:
        print(line, file=sys.stderr)
    return 1 if damaged else 0


def merge(_: RunConfig, args: argparse.Namespace) -> int:
    """Write one checkpoint that holds what several do: oldest first by id, then in the order they are given."""
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
        index.append(entry.uuid, entry.about, entry.size_bytes)
        paths.append(source.path(entry))
    position, parted = _position(sources)
    content = replace(Content.of(index, layout), position=position, seed=sources[0].content.seed)
    write_checkpoint(args.into, content, paths.__getitem__, sources[0].formats, DEFAULT)
    told = {**_told(_read(args.into, args)), "merged": len(sources)}
    print(json.dumps(told) if args.json else _text(told))
    if parted:
        print(
            f"it has no position: its sources stand at different offsets of partition {parted[0]}; it is not to be "
            "filled on from the log",
            file=sys.stderr,
        )
    return 0


def split(_: RunConfig, args: argparse.Namespace) -> int:
    """Write the shares of so many ranks, or the oldest trajectories."""
    _refuse_full(args.into)
    source = _read(args.source, args)
    held = len(source.content)
    if args.first is None:
        if args.parts < 1:
            raise ConfigurationError(f"--parts {args.parts}; give at least 1")
        parts = [(args.into / f"rank_{rank}", shard(source, rank, args.parts)) for rank in range(args.parts)]
    else:
        if not 1 <= args.first <= held:
            raise ConfigurationError(f"--first {args.first}, and {args.source} holds {held}; give 1 to {held}")
        # What is left out was read from the log too: such a part is not to be filled on.
        content = replace(shard(source, 0, 1).content.part(0, args.first), position={})
        parts = [
            (args.into, source._replace(content=replace(content, counter=content[args.first - 1].trajectory_id + 1)))
        ]
    told = []
    for directory, part in parts:
        paths = [part.path(part.content[place]) for place in range(len(part.content))]
        write_checkpoint(directory, part.content, paths.__getitem__, part.formats, DEFAULT)
        told.append(_told(part._replace(directory=directory)))
    rows = [(one["directory"], one["trajectories"], one["samples"]) for one in told]
    print(json.dumps(told) if args.json else table(("directory", "trajectories", "samples"), rows))
    return 0


def _read(directory: Path, args: argparse.Namespace) -> Found:
    def formats(name: str) -> Format:
        try:
            return format_named(name, allow_pickle=args.allow_pickle)
        except ConfigurationError as error:
            said = str(error).replace("allow_pickle=True", "--allow-pickle")
            raise ConfigurationError(f"{directory}: {said}") from error

    return read_checkpoint(directory, formats)


def _ranks(source: Path) -> list[Path]:
    """The directories of ranks below one, in the order of the ranks; itself where it has none."""
    ranks = [path for path in source.glob("rank_*") if path.is_dir() and path.name[5:].isdigit()]
    return sorted(ranks, key=lambda path: int(path.name[5:])) or [source]


def _refuse_full(directory: Path) -> None:
    if directory.exists() and any(directory.iterdir()):
        raise ConfigurationError(f"{directory} is not empty; give a new directory")


def _position(sources: Sequence[Found]) -> tuple[dict[int, int], list[int]]:
    """The position of all of them together, and the partitions that they do not agree about: then there is none."""
    position: dict[int, int] = {}
    parted = set()
    for source in sources:
        for partition, offset in source.content.position.items():
            if position.setdefault(partition, offset) != offset:
                parted.add(partition)
    return ({} if parted else position), sorted(parted)


def _damaged(found: Found) -> list[str]:
    """What is wrong with files, by name."""
    said = []
    for place in range(len(found.content)):
        entry = found.content[place]
        path = found.path(entry)
        try:
            arrays = found.formats(entry.about.format).arrays(path)
            refuse_other(found.content.layout, layout_of(arrays), str(path))
            if path.suffix in (".npz", ".pt"):
                with zipfile.ZipFile(path) as file:
                    if wrong := file.testzip():
                        said.append(f"{path}: {wrong} is not as it was written")
        except FileNotFoundError:
            said.append(f"{path} is gone")
        except (StoreError, RecordError, zipfile.BadZipFile) as error:
            said.append(str(error))
    return said


def _told(found: Found) -> dict[str, Any]:
    content = found.content
    abouts = [content.abouts[number] for number in content.entries["about"]]
    return {
        "directory": str(found.directory),
        "trajectories": len(content),
        "samples": sum(about.samples for about in abouts),
        "bytes": int(content.entries["size_bytes"].sum()),
        "first_id": int(content.entries["id"][0]) if len(content) else None,
        "next_id": content.counter,
        "formats": dict(Counter(about.format for about in abouts)),
        "environments": dict(Counter(about.environment for about in abouts)),
        "model_weights_ids": len({about.model_weights_id for about in abouts}),
        "seed": content.seed,
        "draws": content.draws,
        "position": {str(partition): offset for partition, offset in content.position.items()},
        "arrays": {leaf.path: {"dtype": leaf.dtype, "shape": list(leaf.shape)} for leaf in content.layout},
    }


def _text(told: dict[str, Any]) -> str:
    position = ", ".join(f"{partition}:{offset}" for partition, offset in told["position"].items())
    lines = [
        f"{told['directory']}: {told['trajectories']:,} trajectories, {told['samples']:,} samples, "
        f"{bytes_text(told['bytes'])}",
        f"ids {told['first_id']} to {told['next_id'] - 1}" if told["trajectories"] else f"next id {told['next_id']}",
        f"formats {told['formats']}; {told['model_weights_ids']} ids of weights; seed {told['seed']}, "
        f"{told['draws']} draws",
        f"filled from the log to {position}" if position else "filled by hand",
    ]
    rows = [(path, leaf["dtype"], str(leaf["shape"])) for path, leaf in told["arrays"].items()]
    return "\n".join([*lines, "", table(("array", "dtype", "shape of a row"), rows)])
