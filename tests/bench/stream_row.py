"""Rows of rollouts on the way from the process that makes them to the process that uses them: written, then read back.

`stream-pipelinerl` compares with PipelineRL's streams, if ROLLSTREAM_PIPELINERL names a Python that has them, and
`stream-transferqueue` with TransferQueue, if ROLLSTREAM_TRANSFERQUEUE does. `queue-on-log` compares a TransferQueue
whose data lies on the log with one whose data lies in memory. One process does both halves; processor time is that of
this process, without the broker's or that of other storage.
"""

import os
import time
from collections.abc import Callable

from rollstream.producers.rollout_producer import RolloutProducer
from rollstream.topics.kafka.reader import Reader
from rollstream.topics.kafka.records import BEGINNING
from rollstream.topics.records import Rollout
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import decode_as, kind_of
from tests.bench import material
from tests.bench.measure import Row, Settings, Stopwatch, Timing, in_child, interleaved
from tests.bench.runs import prepared

_AT_ONCE = 500
_SPARE_S = 120.0
_PEERS = {
    "stream-pipelinerl": (
        "ROLLSTREAM_PIPELINERL",
        "pipelinerl_streams",
        "PipelineRL's default stream, a file of JSON lines, one for each group; it is not synced",
    ),
    "stream-transferqueue": (
        "ROLLSTREAM_TRANSFERQUEUE",
        "transferqueue_storage",
        "TransferQueue, put and got by groups; its two storage processes keep everything in memory",
    ),
}
"""By row: the variable that names the peer's Python, the module that runs there, and what it does."""


def rows() -> dict[str, Callable[[Settings], Row]]:
    """Return the rows whose peers are installed."""
    own = {"queue-on-log": _queue_on_log} if _PEERS["stream-transferqueue"][0] in os.environ else {}
    return own | {name: _row(name) for name, (variable, _module, _does) in _PEERS.items() if variable in os.environ}


def _queue_on_log(settings: Settings) -> Row:
    variable, module, baseline = _PEERS["stream-transferqueue"]
    with prepared(settings, "queue") as run:
        ours, raw = interleaved(
            settings.repetitions,
            lambda: in_child(module, settings, run, python=os.environ[variable]),
            lambda: in_child(module, settings, "", python=os.environ[variable]),
        )
    return Row(
        name="queue-on-log",
        what="put rollouts into a TransferQueue on the log, by groups, and get them",
        baseline=baseline,
        size_bytes=len(material.encoded(settings)[0][1]),
        tokens=settings.tokens,
        ours=ours,
        raw=raw,
    )


def _row(name: str) -> Callable[[Settings], Row]:
    variable, module, baseline = _PEERS[name]

    def measure(settings: Settings) -> Row:
        subjects = list(material.rollouts(settings))
        ours, raw = interleaved(
            settings.repetitions,
            lambda: _through_the_log(settings, subjects),
            lambda: in_child(module, settings, "", python=os.environ[variable]),
        )
        return Row(
            name=name,
            what="send rollouts by RolloutProducer until all are acknowledged; then read and decode them",
            baseline=baseline,
            size_bytes=len(material.encoded(settings)[0][1]),
            tokens=settings.tokens,
            ours=ours,
            raw=raw,
        )

    return measure


def _through_the_log(settings: Settings, subjects: list[Rollout]) -> Timing:
    """Send the rollouts and read them back. One more rollout goes first and is not counted: it connects the clients."""
    with (
        prepared(settings, "stream") as run,
        RolloutProducer(settings.kafka, run) as producer,
        Reader(settings.kafka) as reader,
    ):
        topic = topic_name(run, "rollouts")
        reader.assign({(topic, partition): BEGINNING for partition in range(settings.partitions)})

        def send_and_read(rollouts: list[Rollout]) -> None:
            for rollout in rollouts:
                producer.send(rollout)
            producer.flush(_SPARE_S)
            left, deadline = len(rollouts), time.monotonic() + _SPARE_S
            while left > 0:
                for record in reader.poll(_AT_ONCE, 0.05).records:
                    if kind_of(record.value) == Rollout.__name__:  # A new run also has marks.
                        decode_as(Rollout, record.value)
                        left -= 1
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{left} of {len(rollouts)} rollouts did not come back within {_SPARE_S:g} s")

        send_and_read(subjects[:1])
        watch = Stopwatch()
        send_and_read(subjects)
        return watch.timing(len(subjects))
