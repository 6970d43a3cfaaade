"""`rollstream runs`: the runs whose topics are on the brokers, with how much each holds."""

import argparse
import json
from dataclasses import asdict, dataclass
from typing import Any

from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin._listoffsets import OffsetSpec

from pipeline.config import RunConfig
from pipeline.tables import table
from pipeline.tools.plain import time_text
from topics import clients
from topics.catalogue import topic_name
from topics.config import KafkaConfig
from topics.errors import BrokerUnavailable

_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class RunSummary:
    """What one run holds."""

    run: str
    partitions: int
    """Of its rollouts."""
    records: int
    """Records of `rollouts` that are held; those of transactions themselves count, too."""
    newest_ms: int
    """When the newest of them was appended; -1 where there is none."""


def show_runs(config: RunConfig, args: argparse.Namespace) -> int:
    """Print them."""
    found = summaries(config.kafka)
    if args.json:
        print(json.dumps([asdict(summary) for summary in found]))
    elif not found:
        print(f"no run has topics at {config.kafka.bootstrap_servers}; create some with `rollstream topics apply`")
    else:
        rows = [(s.run, s.partitions, s.records, _time(s.newest_ms)) for s in found]
        print(table(("run", "partitions", "records of rollouts", "newest"), rows))
    return 0


def summaries(kafka: KafkaConfig) -> list[RunSummary]:
    """Every run that has a topic of rollouts, that of the newest record first. Raises BrokerUnavailable."""
    partitions = {run: topics["rollouts"] for run, topics in clients.runs(kafka).items() if "rollouts" in topics}
    places = [TopicPartition(topic_name(run, "rollouts"), p) for run, count in partitions.items() for p in range(count)]
    spec: Any = OffsetSpec  # its constructors have no types
    begins, ends, times = (
        _offsets(kafka, places, which) for which in (spec.earliest(), spec.latest(), spec.max_timestamp())
    )
    found = []
    for run, count in partitions.items():
        of_run = [(topic_name(run, "rollouts"), p) for p in range(count)]
        records = sum(ends[place][0] - begins[place][0] for place in of_run)
        found.append(RunSummary(run, count, records, max(times[place][1] for place in of_run)))
    return sorted(found, key=lambda summary: (-summary.newest_ms, summary.run))


def _offsets(
    kafka: KafkaConfig, places: list[TopicPartition], which: OffsetSpec
) -> dict[tuple[str, int], tuple[int, int]]:
    """Offset and timestamp by topic and partition."""
    if not places:
        return {}
    client = clients.admin(kafka)
    asked = client.list_offsets(dict.fromkeys(places, which), request_timeout=_TIMEOUT_S)
    found = {}
    for place, future in asked.items():
        try:
            answer = future.result(_TIMEOUT_S)
        except KafkaException as error:
            raise BrokerUnavailable(f"asking where {place.topic} ends: {error.args[0].str()}") from error
        found[place.topic, place.partition] = (answer.offset, answer.timestamp)
    return found


def _time(at_ms: int) -> str:
    return "" if at_ms < 0 else time_text(at_ms).replace("T", " ")
