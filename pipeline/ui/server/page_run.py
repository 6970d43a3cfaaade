"""One run of the server: the thread that follows it, its index, and the data that is read on request."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from rollstream.pipeline.audit.ledger import LiveLedger
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.control import steering
from rollstream.pipeline.index import series
from rollstream.pipeline.index.indexed_run import RolloutPlace
from rollstream.pipeline.index.run_index import RunIndex
from rollstream.pipeline.tools.ledger import live_ledger
from rollstream.pipeline.ui import irreversible_actions
from rollstream.pipeline.ui.server import dead_letters
from rollstream.pipeline.ui.server.background import Background
from rollstream.pipeline.ui.server.index_filling import IndexFilling
from rollstream.pipeline.ui.server.ledger_keeper import LedgerKeeper, ranges_of
from rollstream.pipeline.ui.server.live_run import LiveRun
from rollstream.pipeline.ui.server.session_list import SessionList, read_sessions, reading_of
from rollstream.producers.flow.mixture import Curriculum, Lesson, pool_sizes
from rollstream.producers.flow.mixture_states import newest_states
from rollstream.topics.control.steering import DesiredState, desired_state
from rollstream.topics.kafka import topic_admin
from rollstream.topics.records import EnvironmentState, MixtureState
from rollstream.topics.records.journal import OffsetRange
from rollstream.topics.wire.catalogue import topic_name


def mixture(config: RunConfig) -> dict[str, Any]:
    """Return the newest state of each worker's mixture."""
    newest = newest_states(config.kafka, config.run)
    wanted = desired_state(config.kafka, config.run)
    states = [newest[name] for name in sorted(newest)]
    return {
        "workers": [
            {"worker": state.worker_id, "environments": _environments(config, state, states, wanted)}
            for state in states
        ]
    }


def _environments(
    config: RunConfig, state: MixtureState, states: Iterable[MixtureState], wanted: DesiredState
) -> list[dict[str, Any]]:
    """Return the rows of a worker, with the weights of its curriculum; a locked or paused environment has weight 0."""
    configured = {each.name or each.use: each.weight for each in config.mixture}
    names = [each.environment for each in state.environments]
    curriculum = Curriculum(
        [Lesson(environment=name, weight=configured.get(name, 1.0)) for name in names],
        config.curriculum,
        {each.environment: each for each in state.environments},
    )
    curriculum.note_others(other for other in states if other is not state)
    curriculum.weigh(wanted.weights)
    weights = curriculum.weights()
    return [
        {
            "environment": each.environment,
            "weight": weights[each.environment] if each.unlocked and each.environment not in wanted.paused else 0.0,
            "drawn": each.drawn,
            "success": _success(each),
            "unlocked": each.unlocked,
            "pools": pool_sizes(each.pools),
            "paused": each.environment in wanted.paused,
        }
        for each in state.environments
    ]


def _success(state: EnvironmentState) -> float | None:
    return state.successes / state.trials if state.trials > 0 else None


T = TypeVar("T")
_THREADS = 4
_KEEP_S = 5.0
_PATIENCE_S = 20.0
"""How long a request waits for data that is not available yet."""


class PageRun:
    """A run of the page. Blocking calls never run on the event loop."""

    def __init__(self, config: RunConfig, archive: str = "") -> None:
        """`archive` is the path or URL of an archive of the run, which is then read instead of its topics."""
        self.config, self.name = config, config.run
        self.source = "archive" if archive else "topics"
        self.live = LiveRun(config, archive)
        self._filling = IndexFilling(config, archive, self.live.note_indexed)
        self._background = Background(f"page {config.run}", _THREADS)
        self._slow = Background(f"topics of {config.run}")
        # Commands do not wait until a long topic has been read, nor queries of the index for a ledger.
        self._commands = Background(f"commands of {config.run}")
        self._ledgers = Background(f"ledger of {config.run}")
        # A change may wait for grouping for a minute, so it has a separate thread.
        self._changes = Background(f"changes of {config.run}")
        self.letters: CachedValue[list[dict[str, Any]]] = CachedValue(
            self._slow, lambda: dead_letters.rows(config.kafka, config.run), _KEEP_S
        )
        self.sessions: CachedValue[SessionList] = CachedValue(
            self._slow, lambda: read_sessions(config.kafka, config.run), _KEEP_S
        )
        self.mixture: CachedValue[dict[str, Any]] = CachedValue(self._slow, lambda: mixture(config), _KEEP_S)
        self._books: LiveLedger | None = None
        self._proving = threading.Lock()
        self.ledger = LedgerKeeper(self._prove, lambda: self.live.revision)

    def start(self) -> None:
        """Begin to read on threads, which call back into the running event loop."""
        self.live.start()
        self._filling.start()

    def close(self) -> None:
        """Stop reading."""
        self.live.close()
        self._filling.close()
        self._background.close()
        self._slow.close()
        self._commands.close()
        self._ledgers.close()
        self._changes.close()

    async def ask(self, question: Callable[[RunIndex], T]) -> T:
        """Return the answer of the index to a query."""
        index = await self._filling.opened(_PATIENCE_S)
        return await self._background.call(lambda: question(index))

    async def compute(self, work: Callable[[], T]) -> T:
        """Run a function that takes a while on a thread; return its result."""
        return await self._background.call(work)

    async def overview(self) -> dict[str, Any]:
        """Return the state of the run, with the progress of its index."""
        answer = await self.live.overview(_PATIENCE_S)
        progress, read = self._filling.progress, answer["indexed"]
        # The figures of a run whose index is on disk are those of its beginning until all of it was read.
        if progress.offset_total and read["offset_done"] == read["offset_total"]:
            answer["indexed"] = progress._asdict()
        answer["commands"] = self.source == "topics"
        answer["problem"] = answer["problem"] or self._filling.problem or None
        return answer

    async def learners(self) -> list[str]:
        """Return the names of the learners on record; none until the index is open."""
        if not self._filling.is_open:
            return []
        return await self.ask(lambda index: series.learners(index.db))

    async def session(self, name: str) -> dict[str, Any]:
        """Return one session with its events and calls, which are read again."""
        sessions, read = await self.sessions.get(), reading_of(self.config.kafka, self.name)
        return await self._slow.call(lambda: sessions.details(name, read))

    async def redrive(self, places: object) -> dict[str, Any]:
        """Send dead letters again."""
        answer = await self._commands.call(lambda: dead_letters.redrive(self.config, places))
        self.letters.forget()
        return answer

    async def command(self, body: Mapping[str, Any]) -> str:
        """Check and record a command, or make a lasting change; return a sentence about the change, else ""."""
        if body.get("command") in irreversible_actions.CHANGES:
            return await self._changes.call(lambda: irreversible_actions.make(self.config, body))
        await self._commands.call(lambda: steering.record(self.config.kafka, self.name, body))
        return ""

    async def wanted(self) -> dict[str, Any]:
        """Return the state that the run should have after all commands, and its lasting changes."""
        wanted = await self._commands.call(lambda: steering.state(self.config.kafka, self.name))
        return wanted | await self._commands.call(lambda: irreversible_actions.state(self.config))

    async def details(self, place: RolloutPlace, tokens_from: int) -> dict[str, Any]:
        """Return all details of one rollout."""
        return await self.ask(lambda index: index.details(place, tokens_from))

    async def offsets(self, fate: str, reason: str | None) -> list[OffsetRange]:
        """Return the ranges of offsets with a fate, according to the newest ledger."""
        return await self._ledgers.call(lambda: self._ranges(fate, reason))

    def _prove(self) -> dict[str, Any]:
        """Return the ledger after reading new records; the first call continues from the saved ledger, if any."""
        with self._proving:
            return self._opened_books().poll().as_dict()

    def _opened_books(self) -> LiveLedger:
        if self._books is None:
            self._books = live_ledger(self.config)
        return self._books

    def _ranges(self, fate: str, reason: str | None) -> list[OffsetRange]:
        bounds = topic_admin.bounds(self.config.kafka, topic_name(self.name, "rollouts"))
        with self._proving:
            books = self._opened_books()
            if not books.positions:
                books.poll()
            return ranges_of(books, bounds, fate, reason)


async def closed(runs: list[PageRun]) -> None:
    """Close runs in parallel."""
    await asyncio.gather(*(asyncio.to_thread(run.close) for run in runs))


class CachedValue(Generic[T]):
    """A value that one thread reads for all concurrent requests, again when it is older than `keep_s`."""

    def __init__(self, background: Background, read: Callable[[], T], keep_s: float) -> None:
        self._background, self._read, self._keep_s = background, read, keep_s
        self._value: T | None = None
        self._read_at = -keep_s
        self._reading: asyncio.Task[T] | None = None

    async def get(self) -> T:
        """Return the value; raise the error that reading it raised."""
        if self._value is not None and time.monotonic() - self._read_at < self._keep_s:
            return self._value
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._refresh())
        # If one of several waiting requests is cancelled, the other requests still need the value.
        return await asyncio.shield(self._reading)

    def forget(self) -> None:
        """Make the next request read the value again."""
        self._value = None

    async def _refresh(self) -> T:
        try:
            self._value = value = await self._background.call(self._read)
            # A value that took long to read is not old at once, or it would be read all the time.
            self._read_at = time.monotonic()
            return value
        finally:
            self._reading = None
