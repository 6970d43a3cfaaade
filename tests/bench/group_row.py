"""Rows of a grouping process with a backlog: `group-and-batch` against a transactional copy loop on the same topic,
`group-quixstreams` against an application of Quix Streams, if ROLLSTREAM_QUIXSTREAMS names a Python that has it.
"""

import os
import sys

from rollstream.topics.wire.catalogue import topic_name
from tests.bench import material, produce_baseline
from tests.bench.measure import Row, Settings, Timing, in_child
from tests.bench.runs import prepared

PEER = "ROLLSTREAM_QUIXSTREAMS"
_GROUP = "grouping_process"


def measure(settings: Settings) -> Row:
    """Return the row whose baseline is the copy loop."""
    baseline = "consume, produce the same bytes and commit at intervals, by the same clients"
    return _measured(settings, "group-and-batch", "copy_loop", sys.executable, baseline)


def measure_peer(settings: Settings) -> Row:
    """Return the row whose baseline is Quix Streams."""
    baseline = "the same groups by Quix Streams, exactly once, its state in RocksDB and a changelog topic"
    return _measured(settings, "group-quixstreams", "quixstreams_grouping", os.environ[PEER], baseline)


def _measured(settings: Settings, name: str, other: str, python: str, baseline: str) -> Row:
    """Measure a fresh run in each repetition; the grouping process and the baseline each read it once, and take turns
    at reading first."""
    records = material.encoded(settings)
    pythons = {other: python, _GROUP: sys.executable}
    timings: dict[str, list[Timing]] = {module: [] for module in pythons}
    for repetition in range(settings.repetitions):
        with prepared(settings, "group") as run:
            produce_baseline.measure(settings.kafka, topic_name(run, "rollouts"), records)
            for module in pythons if repetition % 2 == 0 else reversed(pythons):
                timings[module].append(in_child(module, settings, run, python=pythons[module]))
    return Row(
        name=name,
        what=f"consume, fold, batch and commit, groups of {settings.group_size}",
        baseline=baseline,
        size_bytes=len(records[0][1]),
        tokens=settings.tokens,
        ours=tuple(timings[_GROUP]),
        raw=tuple(timings[other]),
    )
