"""Sinks for copies of a learner's metrics: JSON lines, TensorBoard, Weights & Biases, the `metrics` topic.

The records on `steps` are complete. A step executed again is written once. A sink that fails is logged and no longer
used; it never ends the learner.
"""

import hashlib
import importlib
import itertools
import json
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from rollstream.consumers.files.atomic_files import read_json, write_json
from rollstream.consumers.learner.records.metric_sinks_config import SinksConfig
from rollstream.topics.catalogue import topic_name
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.keys import encode_key
from rollstream.topics.logs import event
from rollstream.topics.metric_values import VALUES
from rollstream.topics.metrics import MetricsWriter
from rollstream.topics.records import LearnerStep, Metrics

logger = logging.getLogger(__name__)

TAIL_BYTES = 1 << 16
"""Number of bytes read at once from the end of a file, to find its last step."""
_FIRST_LOOK_BACK = 1000
"""Number of offsets searched at first from the end of `metrics`."""


class MetricSink(Protocol):
    """One destination of metrics. Any method may raise any error; `MetricSinks` handles it."""

    last: int
    """The newest step that the sink holds, -1 before the first."""

    def write(self, step: LearnerStep) -> None:
        """Write the metrics of a step above `last`."""

    def close(self) -> None:
        """Close files and processes."""


class MetricSinks:
    """The sinks of one learner, by name."""

    def __init__(self, sinks: dict[str, MetricSink]) -> None:
        self._sinks = sinks

    def write(self, step: LearnerStep) -> None:
        """Write the metrics of a committed step to each sink that does not have it yet."""
        for name, sink in list(self._sinks.items()):
            if step.step > sink.last and self._survives(name, lambda sink=sink: sink.write(step)):  # type: ignore[misc]
                sink.last = step.step

    def close(self) -> None:
        """Close all sinks."""
        for name, sink in list(self._sinks.items()):
            self._survives(name, sink.close)
        self._sinks = {}

    def _survives(self, name: str, call: Callable[[], None]) -> bool:
        # Third-party packages may raise any error, and no such error may end a training run.
        try:
            call()
        except Exception as error:
            _lost(name, error)
            del self._sinks[name]
            return False
        return True


def open_sinks(config: SinksConfig, kafka: KafkaConfig, run: str, learner: str, last_recorded_step: int) -> MetricSinks:
    """Open the sinks of a learner whose newest step on record is `last_recorded_step`, -1 if there is none.

    Files with later steps belong to an earlier run of the same name: they are renamed, or, with TensorBoard, their
    events are purged. Raises ConfigurationError, naming the extra, if a package is missing.
    """
    tensorboard = sink_package("tensorboardX", "learner.sinks.tensorboard") if config.tensorboard else None
    wandb = sink_package("wandb", "learner.sinks.wandb") if config.wandb else None
    opening: dict[str, Callable[[], MetricSink]] = {
        "metrics": lambda: TopicSink(kafka, run, learner, last_recorded_step)
    }
    if config.jsonl:
        path = Path(config.jsonl) / run / f"{learner}.jsonl"
        opening["jsonl"] = lambda: _JsonLines(path, run, learner, last_recorded_step)
    if tensorboard:
        events = Path(config.tensorboard) / run / learner
        opening["tensorboard"] = lambda: TensorBoardSink(tensorboard, events, last_recorded_step)
    if wandb:
        opening["wandb"] = lambda: WeightsAndBiasesSink(wandb, config, run, learner, last_recorded_step)
    sinks: dict[str, MetricSink] = {}
    for name, open_sink in opening.items():
        try:
            sinks[name] = open_sink()
        except Exception as error:  # As in MetricSinks: a full disk must not prevent a restart.
            _lost(name, error)
    return MetricSinks(sinks)


def serve_newest(recorded: Sequence[LearnerStep]) -> None:
    """Serve the newest of the steps on record, given in order, with its time and the newest policy version.

    A learner that resumes may wait long for its first batch, or execute recorded steps again, which no sink gets twice.
    """
    if not recorded:
        return
    VALUES.record("learn", {"step": recorded[-1].step})
    VALUES.put("rollstream_learner_step_timestamp_seconds", recorded[-1].timestamp)
    published = [step.policy_version for step in recorded if step.policy_version >= 0]
    if published:
        VALUES.record("learn", {"policy_version": published[-1]})


class TopicSink:
    """The run's topic `metrics`, component learn-{learner}."""

    def __init__(self, kafka: KafkaConfig, run: str, learner: str, last_recorded_step: int) -> None:
        component = f"learn-{learner}"
        self.last = last_on_topic(kafka, run, component) if last_recorded_step >= 0 else -1
        self._writer = MetricsWriter(kafka, run, component, "learn")

    def write(self, step: LearnerStep) -> None:
        VALUES.record("learn", {"step": step.step})
        if step.policy_version >= 0:  # A step that publishes nothing leaves the newest version as it is.
            VALUES.record("learn", {"policy_version": step.policy_version})
        # Drop the reasons of earlier steps that this step does not name.
        VALUES.keep("learn", "reason", {name.removeprefix("left_out/") for name in step.metrics})
        self._writer.write(step.metrics, {"policy_version": str(step.policy_version)}, step=step.step)

    def close(self) -> None:
        self._writer.close()


def last_on_topic(kafka: KafkaConfig, run: str, component: str) -> int:
    """Step of the component's newest record, -1 if there is none.

    Searches back from the end over growing distances: the topic holds the metrics of every process, and may be long.
    """
    topic, key, distance = topic_name(run, "metrics"), encode_key(component), _FIRST_LOOK_BACK
    begin, end = topic_admin.bounds(kafka, topic)[0]
    start = end
    last = -1
    while last < 0 and start > begin:
        start = max(begin, end - distance)
        mine = (m for m in read_to_end(kafka, topic, start=start) if m.key == key)
        for _message, record in SkippedRecords(component).records(Metrics, mine):
            last = max(last, record.step)
        distance *= 10
    return last


class _JsonLines:
    """One JSON object per line: run, learner, step, policy_version, timestamp and all metrics; null if not finite."""

    def __init__(self, path: Path, run: str, learner: str, last_recorded_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._identity = {"run": run, "learner": learner}
        self.last = _cut_and_read_last(path)
        if self.last > last_recorded_step:
            _put_aside(path, self.last, last_recorded_step)
            self.last = -1
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: LearnerStep) -> None:
        fields = {"step": step.step, "policy_version": step.policy_version, "timestamp": step.timestamp}
        figures = {name: value if math.isfinite(value) else None for name, value in step.metrics.items()}
        self._file.write(json.dumps({**self._identity, **fields, **figures}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _cut_and_read_last(path: Path) -> int:
    """Return the step of the last line, -1 if there is none, and cut off a partial line left by a crash."""
    if not path.exists():
        return -1
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        start, tail = size, b""
        # Read backward until the tail holds a whole line: it has two line ends, or begins at the start of the file.
        while start and tail.count(b"\n") < 2:
            start = max(0, start - TAIL_BYTES)
            file.seek(start)
            tail = file.read(size - start)
        whole = tail[: tail.rfind(b"\n") + 1]
        file.truncate(start + len(whole))
    lines = whole.splitlines()
    return int(json.loads(lines[-1])["step"]) if lines else -1


class TensorBoardSink:
    """TensorBoard events of finite metrics, written with tensorboardX; events that a crash left beyond the last step
    are purged at opening.

    It does not use tensorboardX's SummaryWriter, which writes in a thread that cannot be awaited.
    """

    def __init__(self, tensorboard: ModuleType, directory: Path, last_recorded_step: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._state_path = directory / "rollstream.json"
        self.last = int(_read_state(self._state_path).get("last", -1))
        if self.last > last_recorded_step:
            _log_put_aside(directory, self.last, last_recorded_step)
            self.last = -1
        self._proto: Any = tensorboard.proto.event_pb2
        self._scalar: Any = tensorboard.summary.scalar
        # TensorBoard reads files in the order of their names, which begin with the time of creation in seconds.
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
        write_json(self._state_path, {"last": step.step})

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiasesSink:
    """A run of Weights & Biases with one id for each learner, which a resumed learner continues.

    The state file names a step before the step is logged: logged metrics cannot be withdrawn, so a crash between
    the two loses the metrics of the step in this sink, but never repeats them.
    """

    def __init__(self, wandb: ModuleType, config: SinksConfig, run: str, learner: str, last_recorded_step: int) -> None:
        directory = Path(config.wandb)
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / f"{run}.{learner}.json"
        state = _read_state(self._path)
        self.last = int(state.get("last", -1))
        if self.last > last_recorded_step:
            _put_aside(self._path, self.last, last_recorded_step)
            state, self.last = {}, -1
        # Random, because the service must see a new run if the same names are used on another machine, or after a run
        # was deleted.
        self._id = str(state.get("id") or hashlib.sha256(os.urandom(16)).hexdigest()[:12])
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


def sink_package(name: str, setting: str) -> ModuleType:
    """Import the package of a sink. Raises ConfigurationError, naming the extra and the setting, if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigurationError(
            f"{setting} needs {name}, which is not installed: pip install 'rollstream[sinks]', or leave the setting "
            "empty"
        ) from error


def _read_state(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = read_json(path) if path.exists() else {}
    return state


def _put_aside(path: Path, last: int, recorded: int) -> None:
    earlier: Sequence[Path] = list(path.parent.glob(f"{path.name}.*"))
    # Some of the earlier files may have been deleted, and renaming would replace a file.
    names = (path.with_name(f"{path.name}.{number}") for number in itertools.count(len(earlier) + 1))
    path.rename(next(name for name in names if not name.exists()))
    _log_put_aside(path, last, recorded)


def _log_put_aside(path: Path, last: int, recorded: int) -> None:
    event(logger, "sink_begun_anew", level=logging.WARNING, path=str(path), held_step=last, recorded_step=recorded)


def _lost(name: str, error: Exception) -> None:
    event(
        logger,
        "sink_lost",
        level=logging.WARNING,
        sink=name,
        error=f"{type(error).__name__}: {error}",
        remedy="the metrics are on the topic steps; restart the learner to open the sink again",
    )
