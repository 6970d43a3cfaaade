"""Files of a demo and their retention: logs and report stay until the next demo, the broker's data only with --keep.

Each demo is a separate run, named after its start time; the next demo removes the files of demos without --keep.
"""

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rollstream.infra.broker_state import find
from rollstream.pipeline.config import RunConfig
from rollstream.topics.logs import JsonFormatter

DEFAULT_RUN = "demo"
_KEPT = "kept"


def prepare(config: RunConfig) -> RunConfig:
    """Give the demo its own run name, unless one was given, and create the folder that all its files go to."""
    if config.run == DEFAULT_RUN:
        name = f"{DEFAULT_RUN}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
        default = str(config.run_dir / "checkpoints")
        config = replace(config, run=name)
        if config.learner.checkpoint.directory == default:
            checkpoint = replace(config.learner.checkpoint, directory=str(config.run_dir / "checkpoints"))
            config = replace(config, learner=replace(config.learner, checkpoint=checkpoint))
    if config.broker.data_dir == config.data_dir / "broker":
        config = replace(config, broker=replace(config.broker, data_dir=config.run_dir / "broker"))
    config.run_dir.mkdir(parents=True, exist_ok=True)
    return config


def forget_earlier(base: Path) -> None:
    """Remove the folders of earlier demos that are not kept and do not run now."""
    for folder in base.glob(f"runs/{DEFAULT_RUN}-*"):
        if not (folder / _KEPT).exists() and find(folder / "broker") is None:
            shutil.rmtree(folder, ignore_errors=True)


def leave(config: RunConfig, *, keep: bool) -> None:
    """Keep the broker's data for later queries, or remove it. Call it once the broker has stopped."""
    if keep:
        (config.run_dir / _KEPT).touch()
    elif config.broker.data_dir.is_relative_to(config.run_dir):
        shutil.rmtree(config.broker.data_dir, ignore_errors=True)


def log_to(path: Path, level: str) -> None:
    """Send this process's structured logs to a file, because its output is for people."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("rollstream").setLevel(level.upper())


def write_report(config: RunConfig, report: Mapping[str, Any]) -> None:
    """Write the report next to the run's logs, and as the newest report of this data directory."""
    text = json.dumps(report, indent=2)
    for path in (config.run_dir / "report.json", config.data_dir / "report.json"):
        path.write_text(text + "\n", encoding="utf-8")


def places(config: RunConfig, *, kept: bool) -> dict[str, str]:
    """Paths of the files that remain after the demo, by name."""
    paths = {
        "report": str(config.data_dir / "report.json"),
        "logs": str(config.run_dir / "logs"),
        "checkpoints": config.learner.checkpoint.directory,
        "configuration": str(config.run_dir / "run.toml"),
    }
    if kept and config.broker.data_dir.is_relative_to(config.run_dir):
        paths["topics"] = str(config.broker.data_dir)
    return paths


def next_commands(config: RunConfig, *, kept: bool) -> tuple[str, ...]:
    """Commands to try next: queries if the data is kept, else another demo."""
    if not kept:
        task = "add" if config.task != "add" else "dsort3"
        return ("rollstream demo --keep", f"rollstream demo --seed {config.seed + 1}", f"rollstream demo --task {task}")
    configuration = config.run_dir / "run.toml"
    queries = tuple(
        f"rollstream {command} --config {configuration}" for command in ("ledger", "verify", "topics describe")
    )
    broker = config.broker.data_dir
    if not broker.is_relative_to(config.run_dir):
        return queries
    return (
        f"rollstream broker start --port 0 --data {broker}",
        *queries,
        f"rollstream broker stop --data {broker}",
    )
