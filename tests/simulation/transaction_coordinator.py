"""The transaction coordinator: who may write under a transactional id, and how transactions end.

The protocol of clients before KIP-890's second part, which librdkafka speaks. A commit is decided when the coordinator
has it; the markers that make it visible reach the partitions one by one, later.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from confluent_kafka import KafkaError

from tests.simulation.partition_log import Refusal

Place = tuple[str, int]
EMPTY, ONGOING = "Empty", "Ongoing"
COMMITTING, ABORTING = "PrepareCommit", "PrepareAbort"
COMMITTED, ABORTED = "CompleteCommit", "CompleteAbort"


@dataclass
class TransactionState:
    """State of a transactional id."""

    producer_id: int
    epoch: int = -1
    """Raised by each new producer, and by a time-out: whoever has a lower one is fenced."""
    state: str = EMPTY
    places: set[Place] = field(default_factory=set)
    groups: set[str] = field(default_factory=set)
    unmarked: set[Place | str] = field(default_factory=set)
    """Partitions and groups that the marker has not reached."""
    began_s: float = 0.0
    timeout_s: float = 60.0


class TransactionCoordinator:
    """Transactional ids of a cluster."""

    def __init__(self, send_marker: Callable[[TransactionState, Place | str, bool], None]) -> None:
        """`send_marker` writes a marker to a partition or a group at some later time, and then calls `marked`."""
        self._send_marker = send_marker
        self.by_id: dict[str, TransactionState] = {}
        self.by_producer: dict[int, TransactionState] = {}
        self.fencing = True
        """Whether epochs are compared; a broken broker for tests of the judge."""

    def initialise(self, identity: str, timeout_s: float) -> tuple[int, int]:
        """InitProducerId: fence the id's producer, and abort its transaction first."""
        state = self.by_id.get(identity)
        if state is None:
            state = self.by_id[identity] = TransactionState(1000 + len(self.by_id))
            self.by_producer[state.producer_id] = state
        if state.state == ONGOING:
            self._fence_and_abort(state)
        if state.state in (COMMITTING, ABORTING):
            raise Refusal(KafkaError.CONCURRENT_TRANSACTIONS)
        state.epoch += 1
        state.state, state.timeout_s = EMPTY, timeout_s
        return state.producer_id, state.epoch

    def _fence_and_abort(self, state: TransactionState) -> None:
        state.epoch += 1
        self._prepare(state, commit=False)

    def bump(self, producer: tuple[int, int]) -> tuple[int, int]:
        """InitProducerId of a living producer (KIP-360): what it sent before is refused from now on."""
        state = self._current(producer)
        if state.state in (COMMITTING, ABORTING):
            raise Refusal(KafkaError.CONCURRENT_TRANSACTIONS)
        state.epoch += 1
        return state.producer_id, state.epoch

    def add(self, producer: tuple[int, int], now_s: float, place: Place | None, group: str | None = None) -> None:
        """AddPartitionsToTxn, or AddOffsetsToTxn."""
        state = self._current(producer)
        if state.state in (COMMITTING, ABORTING):
            raise Refusal(KafkaError.CONCURRENT_TRANSACTIONS)
        if state.state != ONGOING:
            state.state, state.began_s = ONGOING, now_s
            state.places, state.groups = set(), set()
        if place is not None:
            state.places.add(place)
        if group is not None:
            state.groups.add(group)

    def end(self, producer: tuple[int, int], commit: bool) -> None:
        """EndTxn: this decides the transaction."""
        state = self._current(producer)
        if state.state == ONGOING:
            self._prepare(state, commit)
        elif state.state not in ((COMMITTING, COMMITTED) if commit else (ABORTING, ABORTED)):
            raise Refusal(KafkaError.INVALID_TXN_STATE)
        if state.state in (COMMITTING, ABORTING):
            self.progress(state)

    def _prepare(self, state: TransactionState, commit: bool) -> None:
        state.state = COMMITTING if commit else ABORTING
        state.unmarked = {*state.places, *state.groups}
        for target in sorted(state.unmarked, key=str):
            self._send_marker(state, target, commit)
        self.progress(state)

    def marked(self, state: TransactionState, target: Place | str) -> None:
        """Note that a marker is written."""
        state.unmarked.discard(target)
        self.progress(state)

    def progress(self, state: TransactionState) -> None:
        """Complete a decided transaction once its markers are written."""
        if not state.unmarked and state.state in (COMMITTING, ABORTING):
            state.state = COMMITTED if state.state == COMMITTING else ABORTED

    def check_open(self, producer: tuple[int, int], target: Place | str) -> None:
        """Refuse a write that is not part of an open transaction (KIP-890)."""
        state = self._current(producer)
        if state.state != ONGOING or target not in (*state.places, *state.groups):
            raise Refusal(KafkaError.INVALID_TXN_STATE)

    def expire(self, now_s: float) -> float:
        """Abort transactions that outlived their time-out, and fence their producers; return when the next is due."""
        coming = float("inf")
        for state in self.by_id.values():
            if state.state == ONGOING:
                due_s = state.began_s + state.timeout_s
                if due_s <= now_s:
                    self._fence_and_abort(state)
                else:
                    coming = min(coming, due_s)
        return coming

    def _current(self, producer: tuple[int, int]) -> TransactionState:
        state = self.by_producer[producer[0]]
        if self.fencing and producer[1] != state.epoch:
            raise Refusal(KafkaError.PRODUCER_FENCED)
        return state
