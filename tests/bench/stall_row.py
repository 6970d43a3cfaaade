"""Rows `stall-256` and `stall-1024`: what a version of that many MiB costs the training that goes on meanwhile.

Ours is the copy of the parameters and their digest alone. On one device, training waits only for the part of it that
outlasts the gradients of the next step; on several devices it waits for all of it. The baseline copies the same bytes
through the broker. A mebibyte of parameters counts as a rollout.
"""

import dataclasses
import json
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from rollstream.topics.wire.catalogue import topic_name
from tests.bench.measure import CHILD_TIMEOUT_S, Row, Settings, Stopwatch, Timing, interleaved, ready_child
from tests.bench.runs import prepared
from tests.bench.weights_row import MIB, copying

_CHUNK_BYTES = MIB


def row(name: str, size_mib: int) -> Callable[[Settings], Row]:
    """Return the row of versions of that size."""

    def measure(settings: Settings) -> Row:
        mebibytes = min(size_mib, settings.rollouts)
        data = np.random.default_rng(0).bytes(mebibytes * MIB)
        runs: list[dict[str, Any]] = []

        def ours() -> Timing:
            runs.append(_publishing(settings, mebibytes))
            seconds, cpu_seconds = map(median, zip(*runs[-1]["alone"], strict=True))
            return Timing(mebibytes, seconds, cpu_seconds)

        def raw() -> Timing:
            with prepared(settings, "copied") as run, copying(settings, topic_name(run, "batches")) as copy:
                watch = Stopwatch()
                copy(data, _CHUNK_BYTES)
                return watch.timing(mebibytes)

        taken, copied = interleaved(settings.repetitions, ours, raw)
        gigabytes = runs[-1]["size_bytes"] / 1e9
        return Row(
            name=name,
            what=f"digest and snapshot of a version of {size_mib} MiB, with nothing beside them; a MiB is a rollout",
            baseline="send the same bytes in chunks of a MiB and read them back",
            size_bytes=MIB,
            ours=taken,
            raw=copied,
            figures={
                "s of stall a GB": median(waited for r in runs for _step, waited in r["beside"]) / gigabytes,
                "s of a step a GB, without a snapshot": median(s for r in runs for s in r["steps"]) / gigabytes,
                "s of a step a GB, beside a snapshot": median(s for r in runs for s, _ in r["beside"]) / gigabytes,
                "s of digest and snapshot alone a GB": median(timing.seconds for timing in taken) / gigabytes,
                "of processor time": median(timing.cpu_seconds for timing in taken) / gigabytes,
                "s to publish a GB in full, beside training": median(r["published"][0] for r in runs) / gigabytes,
                "s to publish a GB as a delta, beside training": median(r["published"][-1] for r in runs) / gigabytes,
                "s to copy a GB through the broker": median(timing.seconds for timing in copied) / gigabytes,
                "most memory beside that of training / bytes of a version": max(
                    each["peak_bytes"] / each["size_bytes"] for each in runs
                ),
            },
        )

    return measure


def _publishing(settings: Settings, size_mib: int) -> dict[str, Any]:
    """Return what versions of that size cost a process that publishes them."""
    with (
        prepared(settings, "stall") as run,
        ready_child("publishing_learner", dataclasses.replace(settings, rollouts=size_mib), run) as child,
    ):
        output, _ = child.communicate(timeout=CHILD_TIMEOUT_S)
        result: dict[str, Any] = json.loads(output.splitlines()[-1])
        return result
