"""Files of a demo and their retention: logs and report stay until the next demo, the broker's data only with --keep.

Each demo is a separate run, named after its start time; the next demo removes the files of demos that have ended and
ran without --keep.
"""

import fcntl
import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rollstream.infra.broker.broker_state import find
from rollstream.pipeline.config import RunConfig
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.files.atomic_files import DirectoryLock, StoreError, lock_directory
from rollstream.topics.logs import JsonFormatter

DEFAULT_RUN = "demo"
_KEPT = "kept"
_LOCK = "demo.lock"
"""Lock file in a demo's folder, held while the demo runs."""
_SUPERVISED = "processes/processes.json"
"""List of processes in the folder of a `rollstream run`, while it goes on (`ProcessRegistry`)."""
_PREPARING = "demos.lock"
"""Lock file in the data directory, held while a demo removes earlier folders and takes its own."""


@contextmanager
def prepared(config: RunConfig) -> Iterator[RunConfig]:
    """Remove the folders of earlier demos that are not kept, give this demo its own run name, unless one was given, and
    create the folder that all its files go to; no other demo removes that folder until the context ends.

    Raises ConfigurationError if another demo runs in the folder, or if the topics of an earlier one are kept there or
    served by a broker, and StoreError if the folder cannot be written.
    """
    config.data_dir.mkdir(parents=True, exist_ok=True)
    with (config.data_dir / _PREPARING).open("wb") as preparing:
        # Without this lock, another demo could remove our folder after it was created and before it is locked.
        fcntl.flock(preparing, fcntl.LOCK_EX)
        _forget_earlier(config.data_dir)
        config = _placed(config)
        lock = _own(config.run_dir)
    with lock:
        _check_unkept(config)
        yield config


def _placed(config: RunConfig) -> RunConfig:
    """Return the settings with the demo's run name and its directories."""
    if config.run == DEFAULT_RUN:
        name = f"{DEFAULT_RUN}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
        default = str(config.run_dir / "checkpoints")
        config = replace(config, run=name)
        if config.learner.checkpoint.directory == default:
            checkpoint = replace(config.learner.checkpoint, directory=str(config.run_dir / "checkpoints"))
            config = replace(config, learner=replace(config.learner, checkpoint=checkpoint))
    if config.broker.data_dir == config.data_dir / "broker":
        config = replace(config, broker=replace(config.broker, data_dir=config.run_dir / "broker"))
    return config


def _own(folder: Path) -> DirectoryLock:
    try:
        return lock_directory(folder, _LOCK)
    except StoreError as error:
        if not isinstance(error.__cause__, BlockingIOError):
            raise
        raise ConfigurationError(
            f"another demo runs in {folder}; stop it first, or give this one another name (--run) or folder (--data)"
        ) from error


def _check_unkept(config: RunConfig) -> None:
    """Raise ConfigurationError if the demo would add to topics of an earlier demo, and delete them at its end."""
    kept, data = config.run_dir / _KEPT, config.broker.data_dir
    if data.is_relative_to(config.run_dir) and (kept.exists() or find(data) is not None):
        raise ConfigurationError(
            f"{data} has the topics of an earlier demo of run {config.run}, which were kept; give this demo another "
            f"name (--run), or delete {config.run_dir} once no broker uses it"
        )


def _forget_earlier(base: Path) -> None:
    """Remove the folders of earlier demos that are not kept and do not run now."""
    for folder in base.glob(f"runs/{DEFAULT_RUN}-*"):
        # Another run may be named like a demo, and a run may go on in the folder of a demo.
        if not (folder / _LOCK).exists() or (folder / _SUPERVISED).exists():
            continue
        try:
            lock = lock_directory(folder, _LOCK)
        except StoreError:  # its demo runs now, or its files are not ours to remove
            continue
        with lock:
            # A broker may have been started by hand on the data of a demo that has ended.
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
        task = "choices" if config.task != "choices" else "dsort3"
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
