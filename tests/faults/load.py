"""A producer that keeps sending while things break: whole groups, interleaved, with repeated uids and poison between.

It counts what the broker acknowledged, so that a test can break something after so many more records; it loses nothing
by itself, whatever the broker does.
"""

import random
import threading
import time
from types import TracebackType
from typing import Self

from confluent_kafka import KafkaError, Message

from rollstream.topics.kafka import clients
from rollstream.topics.records import Rollout
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from tests.support.runs import RealRun, rollout
from tests.support.waiting import eventually

POISON = b"\xc3\x01 not a record of ours"
_MOST_QUEUED = 300
"""Records that wait for the broker at most. A broker that is killed again and again takes but a hundred in between:
behind more of them, a record would wait for longer than delivery.timeout.ms."""


class Load:
    """Sends groups of four from its own thread until its block is left; then all groups are whole and acknowledged."""

    def __init__(self, run: RealRun, seed: int, *, rollouts_per_s: float = 200.0, window: int = 12) -> None:
        """`window`: groups under way at a time, whose members mix."""
        self.acknowledged = 0
        """Records the broker has."""
        self.rollouts = 0
        """Rollouts sent that are no repetition: what must be batched or dropped for want of variance."""
        self.repeated = 0
        self.poison = 0
        self._run, self._rng, self._rate, self._window = run, random.Random(seed), rollouts_per_s, window
        self._stop = threading.Event()
        self._failures: list[str] = []
        # Under repeated kills on a busy machine a record waits for minutes, which is no loss.
        self._producer = clients.producer(run.kafka, **{"delivery.timeout.ms": 900_000})
        self._thread = threading.Thread(target=self._send_all, name="load")

    def await_more(self, records: int, timeout_s: float = 60.0) -> None:
        """Wait until the broker has this many records more than now."""
        wanted = self.acknowledged + records
        eventually(lambda: self.acknowledged >= wanted, timeout_s, f"{records} more records acknowledged")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        left = self._producer.flush(60 if error is None else 1)
        if error is None:
            assert (left, self._failures) == (0, []), f"{left} records wait, failures: {self._failures[:5]}"

    def _send_all(self) -> None:
        began, sent, example = time.monotonic(), 0, 0
        under_way: list[list[Rollout]] = []
        while under_way or not self._stop.is_set():
            while len(under_way) < self._window and not self._stop.is_set():
                under_way.append([rollout(f"x{example}", member) for member in range(4)])
                example += 1
            group = self._rng.choice(under_way)
            sending = group.pop(self._rng.randrange(len(group)))
            if not group:
                under_way.remove(group)
            self._send(sending)
            self.rollouts += 1
            if self._rng.random() < 0.02:
                self._send(sending)
                self.repeated += 1
            if self._rng.random() < 0.005:
                self._produce(POISON, encode_key(sending.environment, sending.example_id))
                self.poison += 1
            sent += 1
            # A pace, not a wait for something to happen: what is tested waits on conditions.
            ahead_s = sent / self._rate - (time.monotonic() - began)
            self._producer.poll(max(0.0, ahead_s) if not self._stop.is_set() else 0)
            while len(self._producer) > _MOST_QUEUED:
                self._producer.poll(0.05)

    def _send(self, sending: Rollout) -> None:
        self._produce(encode(sending), encode_key(sending.environment, sending.example_id))

    def _produce(self, value: bytes, key: bytes) -> None:
        self._producer.produce(self._run.topic("rollouts"), value, key, on_delivery=self._delivered)

    def _delivered(self, error: KafkaError | None, _message: Message) -> None:
        if error is None:
            self.acknowledged += 1
        else:
            self._failures.append(error.str())
