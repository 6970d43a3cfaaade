"""Follows one run, live or finished, for the page, on a separate thread.

The page shows the history that has been read so far, while the thread reads on.
"""

import asyncio
import logging
import time
from contextlib import closing
from dataclasses import replace
from typing import Any

from rollstream.consumers.archive.log_source import OBSERVED, ArchiveSource
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.run.observer import RunObserver
from rollstream.pipeline.run.run_statistics import RunSnapshot
from rollstream.pipeline.tools.top import NEWEST
from rollstream.pipeline.ui.server.background import FollowingThread
from rollstream.topics.errors import RollstreamError
from rollstream.topics.files.stores import open_store
from rollstream.topics.kafka import topic_admin
from rollstream.topics.logs import event
from rollstream.topics.wire.catalogue import topic_name

logger = logging.getLogger(__name__)
EVERY_S = 1.0
_CALLS_S = 5.0
"""Time between checks of the number of records of sessions."""
_POLL_S = 0.2
_LOOK_S = 10.0
"""Time between checks of whether an archive has grown."""
AGAIN_S = 5.0
"""Pause after an error of the brokers."""


class LiveRun(FollowingThread):
    """The newest snapshot of a run, and the streams that wait for the next one."""

    def __init__(self, config: RunConfig, archive: str = "") -> None:
        """`archive` is the path or URL of an archive of the run, which is then read instead of its topics."""
        super().__init__(f"run {config.run}", self._follow)
        self.name, self._config, self._archive = config.run, config, archive
        self._snapshot: RunSnapshot | None = None
        self._problem = ""
        self._first = asyncio.Event()
        self._waiting: set[asyncio.Event] = set()
        self.revision = 0
        """Number of times that the run has changed."""
        self.indexed = 0
        """Number of times that its index has changed."""
        self._calls, self._calls_due = 0, 0.0
        """Number of records of sessions and their calls; the topic itself is read only for requests about sessions."""

    @property
    def counts(self) -> dict[str, int]:
        """Numbers that grow as the run goes on."""
        s = self._snapshot
        if s is None:
            return {}
        return {
            "rollouts": s.produced,
            "steps": s.step,
            "versions": s.policy_version + 1,
            "dead_letters": s.dead_lettered,
            "sessions": self._calls,
        }

    def add_waiting(self, moved: asyncio.Event) -> None:
        """Set this event whenever the run changes."""
        self._waiting.add(moved)

    def remove_waiting(self, moved: asyncio.Event) -> None:
        self._waiting.discard(moved)

    async def overview(self, timeout_s: float) -> dict[str, Any]:
        """Return the state of the run; before the first snapshot, wait until the brokers have answered.

        Raises TimeoutError, with the error of the brokers if there was one.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._first.wait()
        except TimeoutError:
            raise TimeoutError(self._problem or "the brokers have not answered yet") from None
        snapshot = self._snapshot
        assert snapshot is not None, "the first snapshot was announced"
        done = snapshot.history - snapshot.history_left
        return {
            "top": snapshot.as_dict(),
            "indexed": {"offset_total": snapshot.history, "offset_done": done},
            "live": is_live(snapshot),
            "commands": False,
            "problem": self._problem or None,
        }

    def _follow(self) -> None:
        while not self._stop.is_set():
            try:
                log = ArchiveSource(open_store(self._archive), self.name, OBSERVED) if self._archive else None
                with closing(self._observer(log)) as observer:
                    self._read(observer, log)
            except (RollstreamError, OSError) as error:
                if self._stop.is_set():
                    return  # Nobody shows this run any more.
                event(logger, "run_not_read", level=logging.WARNING, run=self.name, error=str(error))
                self._problem = str(error)
                self._call(self._tell)
                self._stop.wait(AGAIN_S)

    def _observer(self, log: ArchiveSource | None) -> RunObserver:
        config = self._config
        group = "" if log else config.labeling.group_id(config.run)
        return RunObserver(
            config.kafka,
            config.run,
            keep=NEWEST,
            logged=False,
            labeling_group=group,
            log=log,
            step_patience_s=config.supervisor.step_patience_s,
        )

    def _read(self, observer: RunObserver, log: ArchiveSource | None) -> None:
        """Read until the server stops, or an archive has grown."""
        shown: object = None
        due, looked = 0.0, time.monotonic()
        archived = log.bounds() if log else {}
        while not self._stop.is_set():
            if not observer.poll(_POLL_S) and log is not None:
                self._stop.wait(_POLL_S)
                if time.monotonic() > looked + _LOOK_S:
                    looked = time.monotonic()
                    if log.bounds() != archived:
                        return
            if time.monotonic() < due:
                continue
            due = time.monotonic() + EVERY_S
            if log is None:
                self._count_calls()
            snapshot, before = observer.snapshot(NEWEST), self._snapshot
            if snapshot.history_left and before is not None and not before.history_left:
                continue  # After an error the run is read again; the snapshot from before is closer to its state.
            self._snapshot, self._problem = snapshot, ""
            now = essence(self._snapshot)
            if now != shown:
                shown = now
                self._call(self._tell)

    def _count_calls(self) -> None:
        """Let views update when there are new records of sessions, which the index does not contain."""
        if time.monotonic() < self._calls_due:
            return
        self._calls_due = time.monotonic() + _CALLS_S
        try:
            bounds = topic_admin.bounds(self._config.kafka, topic_name(self.name, "calls"))
        except RollstreamError:
            return  # The next check may succeed.
        calls = sum(end for _begin, end in bounds.values())
        if calls != self._calls:
            self._calls = calls
            self._call(self.note_indexed)

    def note_indexed(self) -> None:
        """Tell the streams that the index has changed."""
        self.indexed += 1
        self._wake()

    def _tell(self) -> None:
        self.revision += 1
        if self._snapshot is not None:
            self._first.set()
        self._wake()

    def _wake(self) -> None:
        for moved in self._waiting:
            moved.set()


def is_live(snapshot: RunSnapshot) -> bool:
    """Whether records still arrive."""
    return not (snapshot.quiet or snapshot.history_left)


def essence(snapshot: RunSnapshot) -> tuple[RunSnapshot, bool]:
    """Return a snapshot without the times that grow while nothing happens, and whether the run is quiet."""
    components = tuple(replace(component, age_s=0.0) for component in snapshot.components)
    return replace(snapshot, quiet_s=0.0, policy_age_s=0.0, components=components), snapshot.quiet
