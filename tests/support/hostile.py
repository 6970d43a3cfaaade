"""Hostile records for every topic of a run: foreign bytes, sound records of the wrong kind, numbers that are none, keys
and headers that are no UTF-8, times before 1970 and in the far future.

They are written as any client may write them; nothing here goes through the checks of our own producers.
"""

import ctypes
import math
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import confluent_kafka
import numpy as np
from confluent_kafka import KafkaError, Message

from rollstream.topics.kafka import clients
from rollstream.topics.records import (
    BatchIndexEntry,
    BatchUse,
    EpisodeSpan,
    ExcludedBatch,
    GroupCancelled,
    LearnerStep,
    Mark,
    Metrics,
    NamedArray,
    PolicyManifest,
    Rollout,
    RolloutMetadata,
    SkippedOffset,
    TrajectoryRecord,
    Turn,
)
from rollstream.topics.wire.catalogue import spec_of
from rollstream.topics.wire.codec import encode
from tests.simulation.roles import MODEL, cluster
from tests.support.batches import random_batch
from tests.support.hostile_input import ODD
from tests.support.runs import RealRun, rollout
from tests.support.topic_settings import change_settings

FAR_MS = 2**62
EARLY_MS = -(10**15)
HUGE = 2**62
FOREIGN = (b"junk", b"", b"\xc3\x01", encode(rollout())[:40], encode(Mark(kind="drain")), None)
"""Values of records that belong on no topic but, some of them, on `rollouts`."""


def plant(run: RealRun) -> dict[str, int]:
    """Write hostile records into every topic but rollouts; returns how many foreign values each topic got."""
    foreign = {}
    send = _Sender(run)
    for topic, records in RECORDS.items():
        _any_time(run, topic)
        values = FOREIGN[:2] + FOREIGN[-1:] if topic == "journal" else FOREIGN
        foreign[topic] = len(values)
        for value in values:
            send(topic, value, uuid.uuid4().bytes)
        for record in records:
            send(topic, encode(record), uuid.uuid4().bytes)
        _send_oddly(send, topic, encode(records[0]) if records else b"junk")
    send.flush()
    for topic in RECORDS:
        send_with_header(run, topic, b"junk", b"no \xff UTF-8", b"\xff")
    return foreign


def plant_rollouts(run: RealRun) -> None:
    """Write hostile records into `rollouts`."""
    send = _Sender(run)
    for record in ROLLOUTS:
        send("rollouts", encode(record), b'["env","x"]')
    for value in FOREIGN:
        send("rollouts", value, b"\xff not a key")
    _send_oddly(send, "rollouts", encode(rollout("odd")))
    send.flush()
    send_with_header(run, "rollouts", encode(rollout("header")), b"no \xff UTF-8", b"\xff")


class _Sender:
    """Writes records to partition 0 of topics of a run."""

    def __init__(self, run: RealRun) -> None:
        self._run, self._producer = run, clients.producer(run.kafka)
        self._failed: list[str] = []

    def __call__(self, topic: str, value: bytes | None, key: bytes | None, **more: Any) -> None:
        def delivered(error: KafkaError | None, _message: Message) -> None:
            if error is not None:
                self._failed.append(f"{topic}: {error.str()}")

        self._producer.produce(self._run.topic(topic), value, key, 0, on_delivery=delivered, **more)

    def flush(self) -> None:
        assert self._producer.flush(120) == 0
        assert not self._failed, self._failed


def _send_oddly(send: _Sender, topic: str, value: bytes) -> None:
    """Send a record with senseless keys, times and headers in turn."""
    for key in (b"\xff\xfe", b"[" * 5000, b'{"a":1}'):
        send(topic, value, key)
    if spec_of(topic).cleanup != "compact":  # a compacted topic refuses a record without a key
        send(topic, value, None)
    for timestamp in (-1, -5, EARLY_MS, FAR_MS):
        send(topic, value, uuid.uuid4().bytes, timestamp=timestamp)
    headers: list[Any] = [("x", b"\xff"), ("x", None), ("", b"")]
    for name in ("rollstream.redriven", "rollstream.source", "rollstream.writer", "__streams.errors.offset"):
        headers.append((name, b"\xff not a number"))
    send(topic, value, uuid.uuid4().bytes, headers=headers)


def _any_time(run: RealRun, topic: str) -> None:
    """Configure the broker to take records of any time."""
    change_settings(run.kafka, run.topic(topic), message__timestamp__after__max__ms=2**63 - 1)


def send_with_header(run: RealRun, topic: str, value: bytes, name: bytes, content: bytes) -> None:
    """Produce a record whose header has any bytes as its name, which Python's client does not allow."""
    if run.kafka.bootstrap_servers == MODEL:
        place = (run.topic(topic), 0)
        cluster().append(place, b"header", value, [(name, content)], (-2, cluster().log(place).end), 0)
        return
    [path] = Path(confluent_kafka.__file__).parents[1].glob("confluent_kafka.libs/librdkafka*")
    library, pointer, text = ctypes.CDLL(str(path)), ctypes.c_void_p, ctypes.c_char_p
    for function, result, arguments in (
        ("conf_new", pointer, ()),
        ("conf_set", ctypes.c_int, (pointer, text, text, text, ctypes.c_size_t)),
        ("new", pointer, (ctypes.c_int, pointer, text, ctypes.c_size_t)),
        ("headers_new", pointer, (ctypes.c_size_t,)),
        ("header_add", ctypes.c_int, (pointer, text, ctypes.c_ssize_t, text, ctypes.c_ssize_t)),
        ("flush", ctypes.c_int, (pointer, ctypes.c_int)),
        ("destroy", None, (pointer,)),
    ):
        call = getattr(library, f"rd_kafka_{function}")
        call.restype, call.argtypes = result, arguments
    error = ctypes.create_string_buffer(512)
    settings = library.rd_kafka_conf_new()
    library.rd_kafka_conf_set(settings, b"bootstrap.servers", run.kafka.bootstrap_servers.encode(), error, 512)
    producer = library.rd_kafka_new(0, settings, error, 512)
    headers = library.rd_kafka_headers_new(1)
    library.rd_kafka_header_add(headers, name, len(name), content, len(content))
    # RD_KAFKA_VTYPE_TOPIC, _PARTITION, _VALUE, _KEY, _MSGFLAGS (copy), _HEADERS and _END of rdkafka.h.
    topic_of, partition_of, value_of, key_of, flags_of, headers_of = map(ctypes.c_int, (1, 3, 4, 5, 7, 10))
    library.rd_kafka_producev.argtypes = [pointer]
    failed = library.rd_kafka_producev(
        pointer(producer),
        *(topic_of, text(run.topic(topic).encode())),
        *(partition_of, ctypes.c_int(0)),
        *(value_of, text(value), ctypes.c_size_t(len(value))),
        *(key_of, text(b"header"), ctypes.c_size_t(6)),
        *(flags_of, ctypes.c_int(2)),
        *(headers_of, pointer(headers)),
        ctypes.c_int(0),
    )
    assert failed == 0
    assert library.rd_kafka_flush(producer, 30_000) == 0
    library.rd_kafka_destroy(producer)


# ---------------------------------------------------------------------- records that decode and make no sense


def _rollouts() -> tuple[object, ...]:
    odd = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
    changes: list[dict[str, Any]] = [
        *({"reward": value, "reward_components": {"exact": value}} for value in odd.values()),
        {"reward_components": odd},
        {"logprobs": np.array([math.nan, math.inf, -math.inf, 0, 0, 0], "<f4")},
        {"loss_mask": np.zeros(0, bool), "logprobs": np.zeros(3, "<f4")},
        {"tokens": np.zeros(0, "<i4"), "loss_mask": np.zeros(0, bool), "logprobs": np.zeros(0, "<f4")},
        {"policy_version": HUGE, "lowest_version": -HUGE, "highest_version": HUGE},
        {"environment": ODD, "example_id": "", "group_size": -1, "branch": -1, "branches": 0},
        {"reward": 1e308},
        {"metadata": RolloutMetadata(worker_id=ODD, timestamp=math.nan, weight_step=-HUGE)},
        {"turns": (Turn(role=ODD, text=ODD, start=-1, stop=2**31 - 1, reward=math.inf, timestamp=-math.inf),)},
        {"token_arrays": {ODD: NamedArray(dtype="O", shape=(2**31,) * 70, data=b"x")}},
    ]
    return tuple(rollout(f"hostile{n}", 0, **change) for n, change in enumerate(changes))


MARKS = (
    Mark(kind="configuration", configuration="{", generation=5, wall_time=math.nan),
    Mark(kind="configuration", configuration='{"core_version": 99}', generation=2**40),
    Mark(kind="configuration", configuration='{"estimator": 7, "batch_rollouts": "x"}', generation=6),
    Mark(kind="configuration", configuration="[]", generation=7),
    Mark(kind="configuration", configuration="null", generation=8),
    Mark(kind="policy_version", policy_version=2**40),
)
ROLLOUTS: tuple[object, ...] = (
    *_rollouts(),
    GroupCancelled(environment=ODD, example_id="", policy_version=-HUGE, group_size=0, uids=("", ODD)),
    *MARKS,
)


def _batches() -> tuple[object, ...]:
    sound = random_batch(0)
    return (
        replace(sound, batch_id=ODD, partition=-7, number=-HUGE),
        replace(sound, batch_id="0-900", splits=np.array([0, HUGE, -5], "<i8")),
        replace(sound, batch_id="0-901", group_index=np.full(len(sound), 2**31 - 1, "<i4")),
        replace(sound, batch_id="0-902", groups=(), uids=(), cut_ms=FAR_MS),
        replace(sound, batch_id="0-903", rewards=np.full(len(sound), math.nan), source_offsets=np.zeros(0, "<i8")),
    )


def _index() -> tuple[object, ...]:
    sound = BatchIndexEntry(
        batch_id="0-901", partition=0, offset=0, rollouts=1, tokens=1, trained_tokens=1, lowest_version=0,
        highest_version=0, size_bytes=1, digest="",
    )  # fmt: skip
    return (
        replace(sound, batch_id=ODD),
        replace(sound, batch_id="7-1", partition=7),
        replace(sound, batch_id="0-950", partition=-1, offset=-1),
        replace(sound, batch_id="0-951", offset=HUGE, rollouts=-HUGE, lowest_version=HUGE, highest_version=-HUGE),
        replace(sound, offset=HUGE),
    )


def _steps() -> tuple[object, ...]:
    use = BatchUse(batch_id="0-900", index_offset=-1, rows=-(2**31), use="trained", row_numbers=(-1, 2**31 - 1))
    odd = LearnerStep(
        learner=ODD, step=HUGE, input_run=ODD, uses=(use,), position=HUGE, policy_version=HUGE, params_digest=ODD,
        trained_total=HUGE, skipped_total=-HUGE, metrics={"loss": math.nan, "kl": math.inf}, timestamp=math.nan,
    )  # fmt: skip
    return (
        odd,
        replace(odd, learner="main", step=-1, timestamp=math.inf, position=-HUGE),
        replace(odd, learner="main", step=2, input_run="no-such-run", timestamp=-1e300, policy_version=-HUGE),
    )


def _policies() -> tuple[object, ...]:
    odd = PolicyManifest(version=HUGE, learner=ODD, step=HUGE, epoch="", tensors=(), chunks=(), digest="")
    return (
        replace(odd, created=math.nan, model="{"),
        replace(odd, version=-HUGE, created=math.inf, model="{"),
        replace(odd, version=7, created=-1e300),
    )


def _trajectories() -> tuple[object, ...]:
    bad = {"x": NamedArray(dtype="O", shape=(2**31,) * 70, data=b"x"), "": NamedArray.of(np.full((2, 1), math.nan))}
    span = EpisodeSpan(uid=ODD, column=-1, start=5, stop=-5)
    return (
        TrajectoryRecord(uid=ODD, environment="", arrays=bad, episodes=(span,), policy_version=-HUGE),
        TrajectoryRecord(uid="", environment=ODD, arrays={}, metadata=RolloutMetadata(timestamp=math.nan)),
    )


RECORDS: dict[str, tuple[object, ...]] = {
    "batches": _batches(),
    "batch-index": _index(),
    "journal": (),
    "evals": tuple(record for record in ROLLOUTS if isinstance(record, Rollout)),
    "weights": (),
    "policies": _policies(),
    "steps": _steps(),
    "metrics": (Metrics(component=ODD, timestamp=math.nan, step=HUGE, values={"a": math.inf}, labels={ODD: ODD}),),
    "dead-letters": (),
    "unlabelled": _trajectories(),
    "trajectories": _trajectories(),
    "control": (
        ExcludedBatch(batch_id=ODD, reason=ODD, generation=HUGE, wall_time=math.nan),
        SkippedOffset(partition=-1, offset=-HUGE, reason=ODD, wall_time=math.inf),
    ),
}
