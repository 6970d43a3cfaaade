"""The rows of the benchmark by name, those of the quick form, and those that need no broker."""

import os
from collections.abc import Callable, Collection
from dataclasses import replace

from tests.bench import (
    archive_row,
    books_row,
    buffer_row,
    codec_row,
    decode_row,
    fold_row,
    gateway_row,
    group_row,
    latency_row,
    learner_rows,
    produce_row,
    restore_row,
    slice_row,
    stall_row,
    step_rows,
    stream_row,
    swap_row,
    trajectory_row,
    weights_row,
    worker_row,
)
from tests.bench.measure import LatencyRow, Row, Settings
from tests.support.vllm_server import is_installed

Measure = Callable[[Settings], Row | LatencyRow]
LENGTHS = {"256": 256, "32k": 32_768}
"""Tokens of a rollout at which rows are measured again whose cost depends on it, and how names end that say so."""


def _at_each_length(name: str, measure: Callable[[Settings], Row]) -> dict[str, Measure]:
    """The row, and the same with short and long rollouts."""

    def at(named: str, tokens: int) -> Measure:
        return lambda settings: replace(measure(settings.with_length(tokens)), name=named)

    return {name: measure, **{f"{name}-{end}": at(f"{name}-{end}", tokens) for end, tokens in LENGTHS.items()}}


ROWS: dict[str, Measure] = {
    **_at_each_length("codec", codec_row.measure),
    **_at_each_length("produce", produce_row.measure),
    **stream_row.rows(),
    "worker": worker_row.measure,
    "fold-1k": fold_row.row("fold-1k", 1_000),
    "fold-10k": fold_row.row("fold-10k", 10_000),
    "fold-100k": fold_row.row("fold-100k", 100_000),
    **_at_each_length("group-and-batch", group_row.measure),
    **({"group-quixstreams": group_row.measure_peer} if group_row.PEER in os.environ else {}),
    "latency-100": latency_row.row("latency-100", 100),
    "latency-1000": latency_row.row("latency-1000", 1_000),
    "gateway": gateway_row.measure,
    **_at_each_length("restore", restore_row.measure),
    "books": books_row.measure,
    **_at_each_length("archive", archive_row.measure),
    "buffer": buffer_row.measure,
    **({"buffer-reverb": buffer_row.measure_peer} if buffer_row.PEER in os.environ else {}),
    "slices": slice_row.row("slices", images=False),
    "slices-images": slice_row.row("slices-images", images=True),
    "trajectories": trajectory_row.row("trajectories", images=False),
    "trajectories-img": trajectory_row.row("trajectories-img", images=True),
    "decode-equal": decode_row.equal,
    "decode-mixed": decode_row.mixed,
    "decode-arrivals": decode_row.arrivals,
    "weights": weights_row.measure,
    "weights-128": weights_row.row("weights-128", 128),
    "weights-1024": weights_row.row("weights-1024", 1024),
    "weights-2048": weights_row.row("weights-2048", 2048),
    "weights-files-128": weights_row.files_row("weights-files-128", 128),
    "weights-files-1024": weights_row.files_row("weights-files-1024", 1024),
    "swap": swap_row.row("swap", "infer"),
    **({"swap-vllm": swap_row.row("swap-vllm", "vllm-plugin")} if is_installed() else {}),
    "stall-256": stall_row.row("stall-256", 256),
    "stall-1024": stall_row.row("stall-1024", 1024),
    **_at_each_length("feed", learner_rows.measure_feed),
    "learn": learner_rows.measure_learn,
    "step": step_rows.measure_step,
    "share-64": step_rows.measure_share,
}
_FILES = {"slices", "slices-images", "trajectories", "trajectories-img"}
_DECODING = {"decode-equal", "decode-mixed", "decode-arrivals"}
_CODEC = {"codec", *(f"codec-{end}" for end in LENGTHS)}
_NO_BROKER = {
    *_CODEC,
    "buffer",
    "buffer-reverb",
    "step",
    "share-64",
    *_FILES,
    *_DECODING,
    "fold-1k",
    "fold-10k",
    "fold-100k",
}
QUICK = (
    *(name for name in ROWS if name.startswith(("codec", "group-and-batch", "feed"))),
    "produce",
    "fold-10k",
    "latency-100",
    "restore",
    "archive",
    "buffer",
    "trajectories",
    "step",
)
"""Rows of the quick form: one of each part, and the way of a rollout at each length."""


def needs_broker(names: Collection[str]) -> bool:
    """Whether one of these rows is measured on a broker."""
    return not set(names) <= _NO_BROKER
