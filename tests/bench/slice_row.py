"""Rows `slices`: slices of episodes drawn from memory-mapped files, against torchrl's where that is installed (extra
`peers`), otherwise against numpy alone.

Each side holds the same episodes and draws slices of one length, uniformly by episode and start; torchrl caches the
boundaries of its episodes.
"""

import importlib.util
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollstream.consumers.buffers.slices.buffer import EpisodeSliceBuffer
from tests.bench.measure import Row, Settings, Stopwatch, Timing, interleaved

_STEPS = 80
_SLICES = 8
_STATE = 32
_IMAGE = (64, 64, 3)
_PEERS = ("torchrl", "tensordict")

Arrays = dict[str, NDArray[Any]]
Side = tuple[Callable[[Arrays], object], Callable[[], object]]
"""How a side adds an episode, and how it draws."""


def row(name: str, *, images: bool) -> Callable[[Settings], Row]:
    """The row of that name: with a vector of state, or with two images a step too."""

    def measure(settings: Settings) -> Row:
        folder = settings.directory / name
        episodes = max(4, settings.rollouts // (80 if images else 8))
        missing = [peer for peer in _PEERS if importlib.util.find_spec(peer) is None]
        baseline = "torchrl's LazyMemmapStorage and SliceSampler with cached boundaries"
        if missing:
            baseline = f"numpy's memmap and a look-up of rows, as {' and '.join(missing)} are not installed"
        (add, draw), (add_raw, draw_raw) = _ours(folder, episodes), (_numpy if missing else _torchrl)(folder, episodes)
        figures = {
            "episodes added a second": _added(add, episodes, images),
            "raw: episodes added a second": _added(add_raw, episodes, images),
        }
        try:
            ours, raw = interleaved(
                settings.repetitions, lambda: _drawn(draw, episodes), lambda: _drawn(draw_raw, episodes)
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        for side, timings in (("", ours), ("raw: ", raw)):
            figures[f"{side}samples of {_SLICES} slices a second"] = median(t.rate for t in timings) / _SLICES
        seen = f"float32 of state {'and two images of 64x64x3 bytes ' if images else ''}a step"
        return Row(
            name=name,
            what=f"draw slices of {_STEPS} steps, {_SLICES} at a time, from {episodes:,} episodes on disk, {_STATE} "
            f"{seen}; a rollout is a slice",
            baseline=baseline,
            size_bytes=sum(leaf.nbytes for leaf in next(_episodes(1, images)).values()),
            ours=ours,
            raw=raw,
            figures=figures,
        )

    return measure


def _episodes(count: int, images: bool) -> Iterator[Arrays]:
    generator = np.random.default_rng(0)
    fixed: Arrays = {
        "state": generator.random((_STEPS, _STATE), np.float32),
        "action": generator.random((_STEPS, 8), np.float32),
        "reward": np.zeros((_STEPS, 1), np.float32),
        "done": np.zeros((_STEPS, 1), np.bool_),
    }
    if images:
        fixed |= {name: generator.integers(0, 256, (_STEPS, *_IMAGE), np.uint8) for name in ("front", "wrist")}
    for number in range(count):
        yield fixed | {"episode": np.full(_STEPS, number)}


def _added(add: Callable[[Arrays], object], count: int, images: bool) -> float:
    """Episodes added a second, without the first, which makes the files."""
    first, *others = _episodes(count, images)
    add(first)
    watch = Stopwatch()
    for episode in others:
        add(episode)
    return watch.timing(len(others)).rate


def _drawn(draw: Callable[[], object], count: int) -> Timing:
    draw()
    watch = Stopwatch()
    for _number in range(count):
        draw()
    return watch.timing(count * _SLICES)


def _ours(folder: Path, episodes: int) -> Side:
    buffer = EpisodeSliceBuffer(folder / "ours", episodes * _STEPS, _STEPS)
    return buffer.add, lambda: buffer.sample(_SLICES)


def _numpy(folder: Path, episodes: int) -> Side:
    """Files of rows; each episode fills the next rows."""
    files: Arrays = {}
    generator, held = np.random.default_rng(0), 0
    (folder / "numpy").mkdir(parents=True)

    def add(episode: Arrays) -> None:
        nonlocal held
        for name, leaf in episode.items():
            if name not in files:
                shape = (episodes * _STEPS, *leaf.shape[1:])
                files[name] = np.memmap(folder / "numpy" / name, leaf.dtype, "w+", shape=shape)
            files[name][held : held + len(leaf)] = leaf
        held += _STEPS

    def draw() -> Arrays:
        rows = generator.integers(held // _STEPS, size=_SLICES)[:, None] * _STEPS + np.arange(_STEPS)
        return {name: file[rows] for name, file in files.items()}

    return add, draw


def _torchrl(folder: Path, episodes: int) -> Side:
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyMemmapStorage, SliceSampler, TensorDictReplayBuffer

    logging.getLogger("torchrl").setLevel(logging.WARNING)  # It logs to stdout, where the JSON goes.
    buffer = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(episodes * _STEPS, scratch_dir=folder / "torchrl"),
        sampler=SliceSampler(slice_len=_STEPS, traj_key="episode", cache_values=True),
        batch_size=_SLICES * _STEPS,
    )

    def add(episode: Arrays) -> None:
        leaves = {name: torch.from_numpy(leaf) for name, leaf in episode.items()}
        buffer.extend(TensorDict(leaves, batch_size=[_STEPS]))

    return add, buffer.sample
