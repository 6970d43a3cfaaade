"""Copies of a learner's figures: JSON lines, TensorBoard, Weights & Biases, the `metrics` topic. The log has them all.

A step that is executed again is written once. A sink that fails is left alone from then on, which is logged; it never
holds up or ends the learner.
"""

import hashlib
import importlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from consumers.buffers.files import read_json, write_json
from consumers.learner.sinks_config import SinksConfig
from topics import clients
from topics.catalogue import topic_name
from topics.config import KafkaConfig
from topics.errors import ConfigurationError
from topics.keys import encode_key
from topics.logs import event
from topics.metrics import MetricsWriter
from topics.records import LearnerStep, Metrics
from topics.skipped import SkippedRecords

logger = logging.getLogger(__name__)

_TAIL_BYTES = 1 << 16


class Sink(Protocol):
    """One place figures are copied to. Any method may raise anything; `Sinks` deals with it."""

    last: int
    """Newest step it holds, -1 before the first."""

    def write(self, step: LearnerStep) -> None:
        """Take the figures of a step above `last`."""

    def close(self) -> None:
        """Let go of files and processes."""


class Sinks:
    """The sinks of one learner, by name."""

    def __init__(self, sinks: dict[str, Sink]) -> None:
        self._sinks = sinks

    def write(self, step: LearnerStep) -> None:
        """Write the figures of a committed step to each sink that does not have it yet."""
        for name, sink in list(self._sinks.items()):
            if step.step > sink.last and self._survives(name, lambda sink=sink: sink.write(step)):  # type: ignore[misc]
                sink.last = step.step

    def close(self) -> None:
        """Close them all."""
        for name, sink in list(self._sinks.items()):
            self._survives(name, sink.close)
        self._sinks = {}

    def _survives(self, name: str, call: Callable[[], None]) -> bool:
        # What may go wrong in packages that are not ours is unknown, and none of it is worth a training run.
        try:
            call()
        except Exception as error:
            _lost(name, error)
            del self._sinks[name]
            return False
        return True


def open_sinks(config: SinksConfig, kafka: KafkaConfig, run: str, learner: str, last_recorded_step: int) -> Sinks:
    """The sinks of a learner whose newest step on record is `last_recorded_step`, -1 where there is none.

    What holds steps beyond that one is of an earlier run of the name: it is put aside. Raises ConfigurationError,
    naming the extra, where a package is missing.
    """
    tensorboard = _package("tensorboardX", "tensorboard") if config.tensorboard else None
    wandb = _package("wandb", "wandb") if config.wandb else None
    opening: dict[str, Callable[[], Sink]] = {"metrics": lambda: _Topic(kafka, run, learner, last_recorded_step)}
    if config.jsonl:
        path = Path(config.jsonl) / run / f"{learner}.jsonl"
        opening["jsonl"] = lambda: _JsonLines(path, run, learner, last_recorded_step)
    if tensorboard:
        events = Path(config.tensorboard) / run / learner
        opening["tensorboard"] = lambda: _TensorBoard(tensorboard, events, last_recorded_step)
    if wandb:
        opening["wandb"] = lambda: _WeightsAndBiases(wandb, config, run, learner, last_recorded_step)
    sinks: dict[str, Sink] = {}
    for name, open_one in opening.items():
        try:
            sinks[name] = open_one()
        except Exception as error:  # as in Sinks: a full disk is no reason not to resume
            _lost(name, error)
    return Sinks(sinks)


class _Topic:
    """The run's topic `metrics`, component learn-{learner}."""

    def __init__(self, kafka: KafkaConfig, run: str, learner: str, last_recorded_step: int) -> None:
        component = f"learn-{learner}"
        self.last = _last_on_topic(kafka, run, component) if last_recorded_step >= 0 else -1
        self._writer = MetricsWriter(kafka, run, component)

    def write(self, step: LearnerStep) -> None:
        self._writer.write(step.metrics, {"policy_version": str(step.policy_version)}, step=step.step)

    def close(self) -> None:
        self._writer.close()


def _last_on_topic(kafka: KafkaConfig, run: str, component: str) -> int:
    key, last = encode_key(component), -1
    mine = (m for m in clients.read_to_end(kafka, topic_name(run, "metrics")) if m.key() == key)
    for _message, record in SkippedRecords(component).records(Metrics, mine):
        last = max(last, record.step)
    return last


class _JsonLines:
    """One object a line: run, learner, step, policy_version, timestamp and every figure; null where not finite."""

    def __init__(self, path: Path, run: str, learner: str, last_recorded_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._of = {"run": run, "learner": learner}
        self.last = _cut_and_read_last(path)
        if self.last > last_recorded_step:
            _put_aside(path, self.last, last_recorded_step)
            self.last = -1
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: LearnerStep) -> None:
        told = {"step": step.step, "policy_version": step.policy_version, "timestamp": step.timestamp}
        figures = {name: value if math.isfinite(value) else None for name, value in step.metrics.items()}
        self._file.write(json.dumps({**self._of, **told, **figures}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _cut_and_read_last(path: Path) -> int:
    """The step of the last line, -1 where there is none; half a line, as a crash leaves it, is cut off."""
    if not path.exists():
        return -1
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        start, tail = size, b""
        # Back until a whole line is in hand: two line ends, or the beginning.
        while start and tail.count(b"\n") < 2:
            start = max(0, start - _TAIL_BYTES)
            file.seek(start)
            tail = file.read(size - start)
        whole = tail[: tail.rfind(b"\n") + 1]
        file.truncate(start + len(whole))
    lines = whole.splitlines()
    return int(json.loads(lines[-1])["step"]) if lines else -1


class _TensorBoard:
    """Events of tensorboardX, of figures that are finite. What a crash left beyond the step remembered is purged when
    it is opened.

    Written without tensorboardX's SummaryWriter, which hands events to a thread and has no way to wait for it.
    """

    def __init__(self, tensorboard: ModuleType, directory: Path, last_recorded_step: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._memory = directory / "rollstream.json"
        self.last = int(_remembered(self._memory).get("last", -1))
        if self.last > last_recorded_step:
            _say_put_aside(directory, self.last, last_recorded_step)
            self.last = -1
        self._proto: Any = tensorboard.proto.event_pb2
        self._scalar: Any = tensorboard.summary.scalar
        # Files are read in the order of their names, which begin with the second they were opened in.
        suffix = f".{self.last + 1:09d}"
        self._writer: Any = tensorboard.event_file_writer.EventsWriter(str(directory / "events"), suffix)
        start = self._proto.SessionLog(status=self._proto.SessionLog.START)
        self._writer.write_event(self._proto.Event(wall_time=time.time(), step=self.last + 1, session_log=start))

    def write(self, step: LearnerStep) -> None:
        summary = self._proto.Event().summary
        for name, value in step.metrics.items():
            if math.isfinite(value):
                summary.MergeFrom(self._scalar(name, value))
        self._writer.write_event(self._proto.Event(wall_time=step.timestamp, step=step.step, summary=summary))
        self._writer.flush()
        write_json(self._memory, {"last": step.step})

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """A run of Weights & Biases with one id for the learner, which a resumed learner goes on with.

    A step is remembered before it is handed over: nothing handed over can be taken back, so a crash in between loses
    its figures here rather than repeat them.
    """

    def __init__(self, wandb: ModuleType, config: SinksConfig, run: str, learner: str, last_recorded_step: int) -> None:
        directory = Path(config.wandb)
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / f"{run}.{learner}.json"
        remembered = _remembered(self._path)
        self.last = int(remembered.get("last", -1))
        if self.last > last_recorded_step:
            _put_aside(self._path, self.last, last_recorded_step)
            remembered, self.last = {}, -1
        # Drawn once: the same names on another machine, or after the run was deleted, are another run to the service.
        self._id = str(remembered.get("id") or hashlib.sha256(os.urandom(16)).hexdigest()[:12])
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self._run: Any = wandb.init(
            mode=config.wandb_mode,
            project=config.wandb_project,
            dir=str(directory),
            id=self._id,
            name=f"{run}/{learner}",
            resume="allow",
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, disable_code=True, x_disable_stats=True
            ),
        )

    def write(self, step: LearnerStep) -> None:
        write_json(self._path, {"id": self._id, "last": step.step})
        self._run.log({**step.metrics, "policy_version": step.policy_version}, step=step.step, commit=True)

    def close(self) -> None:
        self._run.finish()


def _package(name: str, setting: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigurationError(
            f"learner.sinks.{setting} needs {name}, which is not installed: pip install 'rollstream[sinks]', or leave "
            "the setting empty"
        ) from error


def _remembered(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_json(path) if path.exists() else {}
    return found


def _put_aside(path: Path, last: int, recorded: int) -> None:
    taken: Sequence[Path] = list(path.parent.glob(f"{path.name}.*"))
    path.rename(path.with_name(f"{path.name}.{len(taken) + 1}"))
    _say_put_aside(path, last, recorded)


def _say_put_aside(path: Path, last: int, recorded: int) -> None:
    event(logger, "sink_begun_anew", level=logging.WARNING, path=str(path), held_step=last, recorded_step=recorded)


def _lost(name: str, error: Exception) -> None:
    event(
        logger,
        "sink_lost",
        level=logging.WARNING,
        sink=name,
        error=f"{type(error).__name__}: {error}",
        remedy="the figures are on steps; restart the learner to open the sink again",
    )
