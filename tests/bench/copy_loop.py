"""Baseline of `group-and-batch`: a process that consumes rollouts and produces the same bytes, both in one transaction.

It uses the clients and settings of a grouping process: a transaction has at most `poll_records` records, or fewer if
only these arrive within `commit_interval_s`. Nothing is decoded.
"""

import json
import sys
import threading
from typing import Any

from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.wire.catalogue import topic_name
from tests.bench.measure import Timing
from tests.bench.timer import TransactionTimer


def copy(arguments: dict[str, Any]) -> Timing:
    """Copy `rollouts` of a run to its `evals` until the requested number of records is copied."""
    kafka = KafkaConfig(bootstrap_servers=arguments["bootstrap_servers"])
    run = arguments["run"]
    source, target = topic_name(run, "rollouts"), topic_name(run, "evals")
    topic_admin.partitions_of(kafka, source)
    consumer = clients.group_member(kafka, f"{run}.copy", "copy", **{"auto.offset.reset": "earliest"})
    producer = clients.transactional_producer(kafka, f"grouper-{run}-copy")
    producer.init_transactions(30)
    consumer.subscribe([source], on_assign=lambda *_: print("ready", flush=True))
    done = threading.Event()
    timer = TransactionTimer(arguments["rollouts"] + arguments["partitions"], done)
    limit, wait_s = arguments["poll_records"], arguments["commit_interval_s"]
    while not done.is_set():
        messages = [m for m in consumer.consume(limit, wait_s) if m.error() is None]
        if not messages:
            continue
        producer.begin_transaction()
        for message in messages:
            producer.produce(target, message.value(), message.key(), message.partition())
            producer.poll(0)
        producer.send_offsets_to_transaction(
            consumer.position(consumer.assignment()), consumer.consumer_group_metadata(), 15
        )
        producer.commit_transaction(15)
        timer.committed(len(messages))
    consumer.close()
    return timer.timing


if __name__ == "__main__":
    print(json.dumps(copy(json.loads(sys.argv[1]))._asdict()))
