"""A sender for as long as a process runs: it replaces a producer that will never reach a broker again, or that gave up.

See `stranded_clients` for how a producer loses all brokers. The records that it holds fail as if they had timed out. A
producer gives up after a fatal error, such as a missing permission; the next one tries whether the cause is gone.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Literal

from confluent_kafka import KafkaError, KafkaException, Producer

from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka import clients, connection
from rollstream.topics.kafka.client_calls import description_of
from rollstream.topics.kafka.sender import Failure, Sender
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)
_SLICE_S = 1.0
"""Longest time for which a flush does not look whether the producer is stranded."""
_REPORTS_S = 5.0
LEAST_LIFE_S = 5.0
"""Least time for which a producer is kept after a fatal error, so that a cause that lasts costs few connections."""
_PURGED = KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT


class RecoveringSender(Sender):
    """Sends records through a producer, and through another one if the producer loses all brokers for good or gives up.

    Two threads may use it, unlike a Sender: one that sends, and one that polls.
    """

    def __init__(
        self,
        kafka: KafkaConfig,
        *,
        remedy: str = "run this again",
        on_failure: Callable[[Failure], None] | None = None,
        **overrides: Any,
    ) -> None:
        """`overrides` are settings for `clients.producer`; for the others see `Sender`."""
        self._kafka, self._new_producer = kafka, partial(clients.producer, kafka, **overrides)
        self._replacing = threading.Lock()
        self._check = connection.StrandedCheck()
        self._stranded: Producer | None = None
        """A producer that is known to be stranded, unless it has been replaced or has reached a broker since."""
        self._purged: list[Producer] = []
        """Producers that were replaced and have reports left."""
        self._examination: threading.Thread | None = None
        self._heard, self._failing = time.monotonic(), False
        self._renew_s = time.monotonic() + LEAST_LIFE_S
        super().__init__(self._new_producer(), remedy=remedy, on_failure=on_failure)

    def _enqueue(self, *record: Any, **options: Any) -> None:
        if self._fatal is not None and time.monotonic() >= self._renew_s:
            self._renew(self._fatal)
        if self._stranded is not None:
            self._replace()
        with self._replacing:  # A record that entered a producer after its purge would never be reported.
            # A queue that emptied because its records failed says nothing about brokers.
            if not len(self._producer) and not self._failing:
                self._heard = time.monotonic()
            super()._enqueue(*record, **options)

    def _acknowledge(self) -> None:
        super()._acknowledge()
        self._heard, self._failing, self._stranded = time.monotonic(), False, None
        self._check.clear()

    def _serve(self, call: Literal["poll", "flush"], timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        while True:
            self._look()
            left_s = max(0.0, deadline - time.monotonic())
            served = super()._serve(call, min(left_s, _SLICE_S) if call == "flush" else left_s)
            if call == "poll" or not served or left_s <= _SLICE_S:
                return served + self._reports_left()

    def _look(self) -> None:
        """Replace a stranded producer, and examine one that has been silent for long."""
        if self._stranded is not None:
            self._replace()
        elif time.monotonic() - self._heard > connection.SILENT_S:
            self._heard = time.monotonic()
            examined = self._examination is not None and self._examination.is_alive()
            if len(self._producer) and self._topics and not examined:
                # In a thread, because it takes seconds during an outage, and callers must not wait for it.
                self._examination = threading.Thread(target=self._examine, name="examine-producer", daemon=True)
                self._examination.start()

    def _examine(self) -> None:
        producer = self._producer
        if self._check.is_stranded(self._kafka, producer, self._topic()):
            self._stranded = producer

    def _replace(self) -> None:
        """Continue with a new producer, and report the records of the old one as not delivered."""
        with self._replacing:
            stranded, self._stranded = self._stranded, None
            if stranded is not self._producer:
                return
            event(logger, "client_stranded", level=logging.WARNING, topic=self._topic())
            self._begin_again()
        stranded.purge()
        self._reports_left(_REPORTS_S)

    def _renew(self, fatal: KafkaError) -> None:
        """Continue with a new producer after a fatal error, which the records of the old one fail with."""
        failed = self._producer
        failed.purge()
        with suppress(KafkaException):
            failed.flush(_REPORTS_S)
        with self._replacing:
            event(logger, "client_gave_up", level=logging.WARNING, topic=self._topic(), error=description_of(fatal))
            self._begin_again()

    def _begin_again(self) -> None:
        self._purged.append(self._producer)
        self._producer = self._new_producer()
        self._fatal, self._acknowledged = None, False
        self._heard = time.monotonic()
        self._renew_s = self._heard + LEAST_LIFE_S
        self._check.clear()

    def _reports_left(self, timeout_s: float = 0.0) -> int:
        """Process reports of replaced producers, and return how many are left."""
        for producer in tuple(self._purged):
            with suppress(KafkaException):
                producer.flush(timeout_s)
            if not len(producer):
                with suppress(ValueError):  # The other thread may have removed it.
                    self._purged.remove(producer)
        return sum(map(len, self._purged))

    def _topic(self) -> str:
        return next(iter(self._topics))

    def _cause(self, error: KafkaError) -> KafkaError:
        self._failing = True
        if error.code() in _PURGED and self._fatal is None:
            return KafkaError(KafkaError._MSG_TIMED_OUT, "the client had lost all brokers")
        return super()._cause(error)
