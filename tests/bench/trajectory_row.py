"""Rows `trajectories`: steps drawn from a window of trajectories on disk, against RLinf's buffer where ROLLSTREAM_RLINF
names a checkout of it (torch is needed too), otherwise against numpy's own files.

Each side holds the same trajectories and draws as many steps from the same window, with a cache of the same size.
"""

import importlib.util
import logging
import os
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollstream.consumers.buffers.trajectories.buffer import TrajectoryReplayBuffer
from rollstream.topics.wire.trajectory_arrays import Trajectory, flatten
from tests.bench.measure import Row, Settings, Stopwatch, Timing, interleaved

PEER = "ROLLSTREAM_RLINF"
_STEPS, _WIDTH = 80, 8
_STATE = 32
_IMAGE = (64, 64, 3)
_SAMPLE = 256
_WINDOW, _CACHE = 50, 5
_KINDS = 10
"""Different trajectories; more would only fill memory."""

Arrays = dict[str, Any]


class Side(NamedTuple):
    """A buffer to be measured."""

    add: Callable[[int], object]
    """Add one of the trajectories."""
    draw: Callable[[], object]
    settle: Callable[[], object]
    """Return when what was added is in files."""


def row(name: str, *, images: bool) -> Callable[[Settings], Row]:
    """The row of that name: with a vector of state, or with two images a step too."""

    def measure(settings: Settings) -> Row:
        folder = settings.directory / name
        kinds = [_arrays(number, images) for number in range(_KINDS)]
        # Images are 16 MB a trajectory, and memory holds two windows of them.
        window = _WINDOW if settings.rollouts >= 1000 else 10
        peer, baseline = _peer(kinds)
        figures: dict[str, float] = {}
        drawn = {}
        for place in ("memory", "disk"):
            makers = (_ours(kinds), peer)
            first, second = (make(folder / f"{place}-{n}", place, window) for n, make in enumerate(makers))
            for side in (first, second):
                _added(side, window)
            # By now both sides have allocated their memory.
            _note(figures, f"added to {place}", 1, _interleaved(settings, _added, first, second, window))
            drawn[place] = _interleaved(settings, _drawn, first, second, 3 if images else 30)
            _note(figures, f"samples of {_SAMPLE} from {place}", _SAMPLE, drawn[place])
            shutil.rmtree(folder, ignore_errors=True)
        ours, raw = drawn["disk"]
        seen = "and two images of 64x64x3 bytes " if images else ""
        return Row(
            name=name,
            what=f"draw {_SAMPLE} steps at a time from the newest {window} trajectories of {_STEPS} x {_WIDTH} in files"
            f", {_CACHE} cached, {_STATE} float32 of state {seen}a step; a rollout is a step",
            baseline=baseline,
            size_bytes=sum(leaf.nbytes for leaf in flatten(kinds[0]).values()) // (_STEPS * _WIDTH),
            ours=ours,
            raw=raw,
            figures=figures,
        )

    return measure


def _arrays(seed: int, images: bool) -> Arrays:
    generator = np.random.default_rng(seed)
    shape = (_STEPS, _WIDTH)
    observed: Arrays = {"states": generator.random((*shape, _STATE), np.float32)}
    if images:
        observed |= {name: generator.integers(0, 256, (*shape, *_IMAGE), np.uint8) for name in ("front", "wrist")}
    return {
        "actions": generator.random((*shape, 8), np.float32),
        "rewards": generator.random(shape, np.float32),
        "prev_logprobs": generator.random(shape, np.float32),
        "dones": np.zeros((_STEPS + 1, _WIDTH), np.bool_),
        "curr_obs": observed,
    }


Timings = tuple[tuple[Timing, ...], tuple[Timing, ...]]


def _interleaved(
    settings: Settings, measured: Callable[[Side, int], Timing], ours: Side, raw: Side, count: int
) -> Timings:
    return interleaved(settings.repetitions, lambda: measured(ours, count), lambda: measured(raw, count))


def _note(figures: dict[str, float], what: str, size: int, timings: Timings) -> None:
    for label, side in zip(("", "raw: "), timings, strict=True):
        figures[f"{label}{what} a second"] = median(timing.rate for timing in side) / size


def _added(side: Side, count: int) -> Timing:
    """Add trajectories, and wait until those that go to files are written."""
    watch = Stopwatch()
    for number in range(count):
        side.add(number % _KINDS)
    side.settle()
    return watch.timing(count)


def _drawn(side: Side, count: int) -> Timing:
    side.draw()
    watch = Stopwatch()
    for _number in range(count):
        side.draw()
    return watch.timing(count * _SAMPLE)


Make = Callable[[Path, str, int], Side]


def _ours(kinds: list[Arrays]) -> Make:
    trajectories = [Trajectory(arrays=arrays, environment="bench", model_weights_id="w") for arrays in kinds]

    def make(folder: Path, place: str, window: int) -> Side:
        saved: Arrays = {"auto_save": True, "auto_save_path": folder} if place == "disk" else {}
        buffer = TrajectoryReplayBuffer(sample_window_size=window, cache_size=_CACHE, **saved)
        return Side(
            lambda number: buffer.add_trajectories([trajectories[number]]), lambda: buffer.sample(_SAMPLE), buffer.flush
        )

    return make


def _peer(kinds: list[Arrays]) -> tuple[Make, str]:
    """Baseline, with its name."""
    checkout = os.environ.get(PEER)
    if not checkout:
        return _numpy(kinds), f"numpy's list and npz files of flattened arrays, as {PEER} names no checkout of RLinf"
    if importlib.util.find_spec("torch") is None:
        return _numpy(kinds), "numpy's list and npz files of flattened arrays, as torch is not installed"
    return _rlinf(kinds, Path(checkout)), "RLinf's TrajectoryReplayBuffer"


def _numpy(kinds: list[Arrays]) -> Make:
    """A list of flattened arrays; on disk, a file each, with the newest also kept in memory."""
    flat = [
        {name: leaf[-_STEPS:].reshape(-1, *leaf.shape[2:]) for name, leaf in flatten(shard).items()} for shard in kinds
    ]

    def make(folder: Path, place: str, window: int) -> Side:
        folder.mkdir(parents=True)
        held: list[dict[str, NDArray[Any]] | Path] = []
        generator = np.random.default_rng(0)

        def add(number: int) -> None:
            copied = {name: leaf.copy() for name, leaf in flat[number].items()}
            held.append(copied)
            if place == "disk":
                np.savez(folder / f"{len(held)}.npz", **copied)  # type: ignore[arg-type]
                if len(held) > _CACHE:
                    held[-_CACHE - 1] = folder / f"{len(held) - _CACHE}.npz"
            elif len(held) > window:
                held[-window - 1] = folder

        def draw() -> dict[str, NDArray[Any]]:
            newest = held[-window:]
            which, local = np.divmod(generator.integers(len(newest) * _STEPS * _WIDTH, size=_SAMPLE), _STEPS * _WIDTH)
            batch: dict[str, NDArray[Any]] = {}
            for place in np.unique(which):
                shard, into = newest[place], np.flatnonzero(which == place)
                for name, leaf in (np.load(shard) if isinstance(shard, Path) else shard).items():
                    if name not in batch:
                        batch[name] = np.empty((_SAMPLE, *leaf.shape[1:]), leaf.dtype)
                    batch[name][into] = leaf[local[into]]
            return batch

        return Side(add, draw, lambda: None)

    return make


def _rlinf(kinds: list[Arrays], checkout: Path) -> Make:
    import torch

    Buffer, Theirs = rlinf_of(checkout)

    def tensors(tree: Arrays) -> Arrays:
        return {k: tensors(v) if isinstance(v, dict) else torch.from_numpy(v) for k, v in tree.items()}

    trajectories = [Theirs(max_episode_length=_STEPS, model_weights_id="w", **tensors(arrays)) for arrays in kinds]

    def make(folder: Path, place: str, window: int) -> Side:
        saved: Arrays = {"auto_save": True, "auto_save_path": str(folder)} if place == "disk" else {}
        buffer = Buffer(sample_window_size=window, cache_size=_CACHE, **saved)

        def settle() -> None:
            # Only `close` waits for the files of RLinf's buffer, which afterwards needs a new executor to save.
            if place == "disk":
                buffer.close()
                buffer._save_executor = type(buffer._save_executor)(20)

        return Side(
            lambda number: buffer.add_trajectories([trajectories[number]]), lambda: buffer.sample(_SAMPLE), settle
        )

    return make


def rlinf_of(checkout: Path) -> tuple[Any, Any]:
    """The classes of RLinf's buffer and trajectory, imported without the other imports of its packages."""
    for name in ("", ".data", ".data.schema", ".data.storage", ".data.storage.replay", ".utils"):
        package = types.ModuleType(f"rlinf{name}")
        package.__path__ = [str(checkout / f"rlinf{name}".replace(".", "/"))]
        sys.modules[package.__name__] = package
    stand_ins: dict[str, Arrays] = {
        "rlinf.utils.logging": {"get_logger": lambda: logging.getLogger("rlinf")},
        "sortedcontainers": {"SortedList": list},
    }
    for name, members in stand_ins.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        sys.modules.setdefault(name, module)
    logging.getLogger("rlinf").setLevel(logging.ERROR)
    replay = importlib.import_module("rlinf.data.storage.replay.buffer")
    return replay.TrajectoryReplayBuffer, importlib.import_module("rlinf.data.schema.embodied_types").Trajectory
