"""Baseline of `group-quixstreams`: the same groups by an application of Quix Streams, in a Python that has it.

Exactly once, and with the state in RocksDB and a changelog topic, which is what the library offers. Each member is a
value of its own in the state of its key, so that no list is written again and again. A complete group is one record:
the bytes of its members, each with its RLOO advantage. The baseline has no rules for versions, deadlines or
damage.
"""

import json
import sys
import tempfile
import threading
from typing import Any, Final

import msgspec
from quixstreams import Application
from quixstreams.internal_producer import InternalProducer
from quixstreams.state import State
from quixstreams.state.rocksdb import RocksDBOptions

from rollstream.topics.config import KafkaConfig
from rollstream.topics.records import Rollout
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import decode
from tests.bench.measure import Timing
from tests.bench.timer import TransactionTimer

_COMMIT_S: Final = 0.25
"""After how long the last transaction ends; the others end after `poll_records` records."""


def fold(value: bytes, state: State) -> list[bytes]:
    """Keep a member, or return the group that it completes."""
    rollout = decode(value)
    if not isinstance(rollout, Rollout):
        return []
    number = state.get("members", 0)
    if number + 1 < rollout.group_size:
        state.set("members", number + 1)
        state.set(str(number), [rollout.reward, value])
        return []
    members = [*(state.get(str(each)) for each in range(number)), [rollout.reward, value]]
    for each in ("members", *map(str, range(number))):
        state.delete(each)
    total = sum(reward for reward, _ in members)
    return [msgspec.msgpack.encode([[r - (total - r) / max(1, number), data] for r, data in members])]


def group(arguments: dict[str, Any], state_dir: str) -> Timing:
    """Group the rollouts of a run, writing groups to its `evals`, until all are committed."""
    kafka, run, done = KafkaConfig(), arguments["run"], threading.Event()
    timer, processed = TransactionTimer(arguments["rollouts"] + arguments["partitions"], done), 0
    commit = InternalProducer.commit_transaction

    def count(*_: object) -> None:
        nonlocal processed
        processed += 1

    def timed(self: InternalProducer, *args: Any, **options: Any) -> None:
        nonlocal processed
        commit(self, *args, **options)
        timer.committed(processed)
        processed = 0
        if done.is_set():
            app.stop()

    InternalProducer.commit_transaction = timed
    app = Application(
        arguments["bootstrap_servers"],
        consumer_group=f"{run}.quixstreams",
        auto_offset_reset="earliest",
        processing_guarantee="exactly-once",
        commit_every=arguments["poll_records"],
        commit_interval=_COMMIT_S,
        producer_extra_config={
            "compression.type": kafka.compression,
            "compression.level": kafka.compression_level,
            "message.max.bytes": kafka.max_record_bytes,
        },
        consumer_extra_config={"fetch.message.max.bytes": kafka.max_record_bytes},
        on_message_processed=count,
        state_dir=state_dir,
        rocksdb_options=RocksDBOptions(dumps=msgspec.msgpack.encode, loads=msgspec.msgpack.decode),
        loglevel="WARNING",
    )
    source = app.topic(topic_name(run, "rollouts"), key_deserializer="bytes", value_deserializer="bytes")
    target = app.topic(topic_name(run, "evals"), key_serializer="bytes", value_serializer="bytes")
    groups = app.dataframe(source).apply(fold, stateful=True, expand=True)
    groups.to_topic(target)
    print("ready", flush=True)
    app.run()
    return timer.timing


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(group(json.loads(sys.argv[1]), directory)._asdict()))
