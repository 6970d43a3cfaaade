"""`rollstream runs`: lists the runs whose topics are on the brokers, with the number of their records."""

import argparse
import json
from dataclasses import asdict, dataclass

from rollstream.pipeline.command_line.command_parser import set_handler
from rollstream.pipeline.command_line.plain_values import time_text
from rollstream.pipeline.command_line.text_tables import table
from rollstream.pipeline.config import RunConfig
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.topic_admin import offsets
from rollstream.topics.wire.catalogue import topic_name


@dataclass(frozen=True)
class RunSummary:
    """Size of one run."""

    run: str
    partitions: int
    """Partitions of `rollouts`."""
    records: int
    """Offsets held by `rollouts`, including transaction markers."""
    newest_ms: int
    """Append time of the newest record; -1 without records."""


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream runs`."""
    set_handler(parser, show_runs, example="rollstream runs -b localhost:9092", json=True)


def show_runs(config: RunConfig, args: argparse.Namespace) -> int:
    """Print the runs."""
    runs = summaries(config.kafka)
    if args.json:
        print(json.dumps([asdict(summary) for summary in runs]))
    elif not runs:
        print(f"no run has topics at {config.kafka.bootstrap_servers}; create some with `rollstream topics apply`")
    else:
        rows = [(s.run, s.partitions, s.records, _time(s.newest_ms)) for s in runs]
        print(table(("run", "partitions", "records of rollouts", "newest"), rows))
    return 0


def summaries(kafka: KafkaConfig) -> list[RunSummary]:
    """Summarize every run with a topic `rollouts`, the run with the newest record first. Raises BrokerUnavailable."""
    partitions = {run: topics["rollouts"] for run, topics in topic_admin.runs(kafka).items() if "rollouts" in topics}
    places = [(topic_name(run, "rollouts"), p) for run, count in partitions.items() for p in range(count)]
    begins, ends = offsets(kafka, places, "earliest"), offsets(kafka, places, "latest")
    newest = offsets(kafka, places, "max_timestamp")
    summaries = []
    for run, count in partitions.items():
        of_run = [(topic_name(run, "rollouts"), p) for p in range(count)]
        records = sum(ends[place].offset - begins[place].offset for place in of_run)
        summaries.append(RunSummary(run, count, records, max(newest[place].timestamp_ms for place in of_run)))
    return sorted(summaries, key=lambda summary: (-summary.newest_ms, summary.run))


def _time(at_ms: int) -> str:
    return "" if at_ms < 0 else time_text(at_ms).replace("T", " ")
