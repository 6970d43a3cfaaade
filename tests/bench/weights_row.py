"""Rows `weights` to `weights-2048`: a policy version of so many MiB published and followed, against the same bytes sent
in the same chunks and read back; `weights-files-*`: a version in files of a directory, against the same bytes written
to a file, synced and read back.

A run publishes version after version, so both sides keep their clients, and the first two versions are not measured:
from the third on, a follower has memory of earlier versions to use again. A figure has the time of the first version.
A mebibyte of parameters counts as a rollout. Figures of the first row compare deltas of 1 % and 3 % of the values with
the full version.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import ml_dtypes
import numpy as np

from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.content import Arrays
from rollstream.consumers.weights.follower import VersionSource
from rollstream.consumers.weights.publisher import WeightsPublisher
from rollstream.consumers.weights.step_log import StepLog
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.reader import Reader
from rollstream.topics.records import PolicyManifest
from rollstream.topics.wire.catalogue import topic_name
from tests.bench.measure import Row, Settings, Stopwatch, Timing, interleaved
from tests.bench.runs import prepared

TENSORS, SHAPE = 16, (1024, 1024)
MIB = 1024 * 1024
SIZE_MIB = 2 * TENSORS
"""Size of the parameters in bfloat16."""
_SPARE_S = 120.0


def measure(settings: Settings) -> Row:
    """Publish and load versions of 32 MiB in full; then deltas."""
    return _through_the_log(settings, "weights", SIZE_MIB, _deltas(settings, random_arrays(0)))


def row(name: str, size_mib: int) -> Callable[[Settings], Row]:
    """Return the row of versions of that size, or of `settings.rollouts` MiB if that is less."""

    def measure(settings: Settings) -> Row:
        return _through_the_log(settings, name, min(size_mib, settings.rollouts), {})

    return measure


def files_row(name: str, size_mib: int) -> Callable[[Settings], Row]:
    """Return the row of versions of that size in files, or of `settings.rollouts` MiB if that is less."""

    def measure(settings: Settings) -> Row:
        mebibytes = min(size_mib, settings.rollouts)
        arrays = random_arrays(0, mebibytes // 2)
        with tempfile.TemporaryDirectory() as folder:
            config = WeightsConfig(anchor_every=1, keep_versions=1, transport="files", url=f"{folder}/weights")
            with prepared(settings, name) as run, publishing(settings, run, config) as (log, source):

                def raw() -> Timing:
                    watch = Stopwatch()
                    _copy_by_file(Path(folder) / "raw", arrays, config.file_bytes)
                    return watch.timing(mebibytes)

                with _following(settings, run, source, log, arrays) as (ours, figures):
                    published, copied = interleaved(settings.repetitions, ours, raw)
        return Row(
            name=name,
            what=f"publish a version of {mebibytes} MiB in files, read it and check its digests; a MiB is a rollout",
            baseline="write the same bytes to a file, sync it, and read them back in pieces",
            size_bytes=MIB,
            ours=published,
            raw=copied,
            figures=figures,
        )

    return measure


@contextmanager
def _following(
    settings: Settings, run: str, publisher: WeightsPublisher, log: StepLog, arrays: Arrays
) -> Iterator[tuple[Callable[[], Timing], dict[str, float]]]:
    """A function that publishes a version and follows it, after two such versions; and the rate of the first."""
    mebibytes = sum(array.nbytes for array in arrays.values()) // MIB
    with closing(VersionSource(settings.kafka, run)) as follower:

        def followed() -> Timing:
            watch = Stopwatch()
            manifest = publish(publisher, log, arrays)
            deadline = time.monotonic() + _SPARE_S
            while (whole := follower.poll()) is None or whole.manifest.version < manifest.version:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"version {manifest.version} was not followed within {_SPARE_S:g} s")
            return watch.timing(mebibytes)

        first, _second = followed(), followed()
        yield followed, {"first version, MiB a second": first.rate}


def _through_the_log(settings: Settings, name: str, size_mib: int, figures: dict[str, float]) -> Row:
    # The log keeps one version besides the one being published, so that the disk does not fill up.
    config = WeightsConfig(anchor_every=1, keep_versions=1, transport="log")
    arrays = random_arrays(0, size_mib // 2)
    with (
        prepared(settings, name) as run,
        publishing(settings, run, config) as (log, source),
        copying(settings, topic_name(run, "batches")) as copy,
        _following(settings, run, source, log, arrays) as (ours, first),
    ):

        def raw() -> Timing:
            data = b"".join(array.tobytes() for array in arrays.values())
            watch = Stopwatch()
            copy(data, config.chunk_bytes)
            return watch.timing(size_mib)

        published, copied = interleaved(settings.repetitions, ours, raw)
    return Row(
        name=name,
        what=f"publish a version of {size_mib} MiB, fetch it and check its digests; a MiB counts as a rollout",
        baseline="send the same bytes in chunks of the same size and read them back",
        size_bytes=MIB,
        ours=published,
        raw=copied,
        figures=first | figures,
    )


def random_arrays(seed: int, tensors: int = TENSORS) -> Arrays:
    """Parameters like those of a trained model: normally distributed, in bfloat16."""
    random = np.random.default_rng(seed)
    return {
        f"layer.{number}": (0.02 * random.standard_normal(SHAPE, dtype=np.float32)).astype(ml_dtypes.bfloat16)
        for number in range(tensors)
    }


def changed(arrays: Arrays, share: float) -> Arrays:
    """The same arrays with that share of the values one unit in the last place larger in magnitude."""
    random = np.random.default_rng(1)
    result = {}
    for name, array in arrays.items():
        bits = array.view(np.uint16).copy()
        bits[random.random(array.shape) < share] += 1
        result[name] = bits.view(ml_dtypes.bfloat16)
    return result


def _deltas(settings: Settings, arrays: Arrays) -> dict[str, float]:
    figures = {}
    with prepared(settings, "deltas") as run, publishing(settings, run, WeightsConfig()) as (log, source):
        full = publish(source, log, arrays)
        figures["full version: stored bytes / bytes"] = full.figures["stored_bytes"] / full.figures["full_bytes"]
        figures["full version, s to publish"] = _seconds(full)
        for percent in (1, 3):
            delta = publish(source, log, changed(arrays, percent / 100))
            # A delta is against the version before it, so publish the first parameters again for the next one.
            publish(source, log, arrays)
            figures[f"delta of {percent} %: bytes / full"] = delta.figures["stored_bytes"] / delta.figures["full_bytes"]
            figures[f"delta of {percent} %, s to publish"] = _seconds(delta)
    return figures


def _copy_by_file(path: Path, arrays: Arrays, piece_bytes: int) -> None:
    """Write the bytes to a file, sync it, and read them back in pieces."""
    views = [memoryview(array.view(np.uint8).reshape(-1)) for array in arrays.values()]
    with path.open("wb") as file:
        for view in views:
            file.write(view)
        file.flush()
        os.fsync(file.fileno())
    left = bytearray(sum(map(len, views)))
    with path.open("rb") as file:
        at = 0
        while piece := file.read(piece_bytes):
            left[at : at + len(piece)] = piece
            at += len(piece)
    path.unlink()


def _seconds(manifest: PolicyManifest) -> float:
    return sum(value for name, value in manifest.figures.items() if name.endswith("_s"))


@contextmanager
def publishing(
    settings: Settings, run: str, config: WeightsConfig, model: str = "{}"
) -> Iterator[tuple[StepLog, WeightsPublisher]]:
    """The writers of versions, as a learner has them; `model` is the JSON of the model's configuration."""
    with (
        closing(StepLog(settings.kafka, run, "default")) as log,
        closing(WeightsPublisher(settings.kafka, run, "default", model, config)) as source,
    ):
        yield log, source


def publish(source: WeightsPublisher, log: StepLog, arrays: Arrays) -> PolicyManifest:
    """Publish the next version, as the record of a step does."""
    manifest = source.stage(source.latest_version + 1, arrays)
    log.commit([source.record(manifest)])
    source.committed(manifest)
    return manifest


@contextmanager
def copying(settings: Settings, topic: str) -> Iterator[Callable[[bytes, int], None]]:
    """A function that sends bytes to a partition in chunks of a size, and reads them; it keeps its clients."""
    producer = clients.producer(settings.kafka, **{"compression.type": "none"})
    with Reader(settings.kafka, isolation="read_uncommitted") as reader:

        def copy(data: bytes, chunk_bytes: int) -> None:
            begin: list[int] = []
            for at in range(0, len(data), chunk_bytes):
                while True:
                    try:
                        producer.produce(
                            topic,
                            data[at : at + chunk_bytes],
                            partition=0,
                            on_delivery=lambda _error, message: begin.append(message.offset()),
                        )
                        break
                    except BufferError:
                        producer.poll(0.01)
            if producer.flush(_SPARE_S):
                raise RuntimeError(f"the broker did not take {len(data)} bytes within {_SPARE_S:g} s")
            left, deadline = len(data), time.monotonic() + _SPARE_S
            reader.assign({(topic, 0): min(begin)})
            while left > 0:
                left -= sum(len(record.value or b"") for record in reader.poll(100, 0.05).records)
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{left} bytes did not come back within {_SPARE_S:g} s")
            reader.unassign()

        yield copy
