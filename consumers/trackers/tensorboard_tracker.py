"""TensorBoardTracker: events for TensorBoard with the finite figures of each step, written with tensorboardX."""

import math
import time
from typing import Any

from rollstream.consumers.files.atomic_files import read_json, write_json
from rollstream.consumers.trackers.tracker import TrackedRun, TrackedStep, note_new_beginning, tracker_package


class TensorBoardTracker:
    """Events below {directory}/{run}/{learner}; those that a crash left beyond the last step are purged at opening.

    It does not use tensorboardX's SummaryWriter, which writes in a thread that cannot be awaited.
    """

    def __init__(self, tracked: TrackedRun) -> None:
        tensorboard = tracker_package("tensorboardX")
        directory = tracked.directory / tracked.run / tracked.learner
        directory.mkdir(parents=True, exist_ok=True)
        self._state_path = directory / "rollstream.json"
        self.last = int(read_json(self._state_path)["last"]) if self._state_path.exists() else -1
        if self.last > tracked.newest_step:
            note_new_beginning(directory, self.last, tracked.newest_step)
            self.last = -1
        self._proto: Any = tensorboard.proto.event_pb2
        self._scalar: Any = tensorboard.summary.scalar
        # TensorBoard reads files in the order of their names, which begin with the time of creation in seconds.
        suffix = f".{self.last + 1:09d}"
        self._writer: Any = tensorboard.event_file_writer.EventsWriter(str(directory / "events"), suffix)
        start = self._proto.SessionLog(status=self._proto.SessionLog.START)
        self._writer.write_event(self._proto.Event(wall_time=time.time(), step=self.last + 1, session_log=start))

    def write(self, step: TrackedStep) -> None:
        summary = self._proto.Event().summary
        for name, value in step.metrics.items():
            if math.isfinite(value):
                summary.MergeFrom(self._scalar(name, value))
        self._writer.write_event(self._proto.Event(wall_time=step.timestamp, step=step.step, summary=summary))
        self._writer.flush()
        write_json(self._state_path, {"last": step.step})

    def close(self) -> None:
        self._writer.close()
