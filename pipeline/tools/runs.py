"""`rollstream runs`: lists the runs whose topics are on the brokers, or compares runs: settings first, then figures."""

import argparse
import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass

from rollstream.pipeline.command_line.command_parser import config_of_run, set_handler
from rollstream.pipeline.command_line.plain_values import compact, time_text
from rollstream.pipeline.command_line.text_tables import table
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.run.observer import RunObserver
from rollstream.pipeline.run.run_statistics import RunSnapshot
from rollstream.pipeline.run_settings import changed_settings, differing_settings
from rollstream.pipeline.tools.top import NEWEST
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
    parser.add_argument("names", nargs="*", metavar="RUN", help="compare these runs: settings that differ, and figures")


def show_runs(config: RunConfig, args: argparse.Namespace) -> int:
    """Print the runs, or compare those that are named."""
    if args.names:
        return _compare([config_of_run(name, args) for name in dict.fromkeys(args.names)], args.json)
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


def _compare(configs: Sequence[RunConfig], as_json: bool) -> int:
    """Print the settings that differ among runs, and the state of each run."""
    sides = [changed_settings(config) for config in configs]
    missing = [config.run for config, side in zip(configs, sides, strict=True) if side is None]
    differing = {} if missing else differing_settings([side or () for side in sides])
    snapshots = [_snapshot(config) for config in configs]
    if as_json:
        names = [config.run for config in configs]
        settings = {key: dict(zip(names, values, strict=True)) for key, values in differing.items()}
        print(compact({"settings": None if missing else settings, "runs": [s.as_dict() for s in snapshots]}))
        return 0
    if missing:
        print(f"the configuration of {' and '.join(missing)} is not on this machine")
    elif differing:
        print(table(("setting", *(c.run for c in configs)), [(key, *values) for key, values in differing.items()]))
    else:
        print("all have the same settings")
    rows = [
        (s.run, s.step, s.rollouts, s.trained, sum(s.dropped.values()))
        + ((f"{s.reward:.3f}", f"{s.success:.3f}") if s.rollouts else ("-", "-"))
        for s in snapshots
    ]
    heads = ("run", "step", "rollouts", "trained", "dropped", f"reward of the newest {NEWEST:,}", "success")
    print(f"\n{table(heads, rows)}")
    return 0


def _snapshot(config: RunConfig) -> RunSnapshot:
    labeling = config.labeling.group_id(config.run)
    with closing(RunObserver(config.kafka, config.run, keep=NEWEST, logged=False, labeling_group=labeling)) as observer:
        observer.catch_up()
        return observer.snapshot(NEWEST)


def _time(at_ms: int) -> str:
    return "" if at_ms < 0 else time_text(at_ms).replace("T", " ")
