"""A sender for as long as a process runs: it replaces a producer that will never reach a broker again.

See `stranded_clients` for how that happens. The records that such a producer holds fail as if they had timed out.
"""

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from confluent_kafka import KafkaError

from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka import clients, stranded_clients
from rollstream.topics.kafka.sender import Failure, Sender
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)
SILENT_S = 30.0
"""Time without any acknowledgement after which a producer that has records to deliver is examined."""
_REPORTS_S = 5.0
_PURGED = KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT


class RecoveringSender(Sender):
    """Sends records through a producer, and through another one if the producer loses all brokers for good.

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
        self._stranded = False
        self._examination: threading.Thread | None = None
        self._heard = time.monotonic()
        super().__init__(self._new_producer(), remedy=remedy, on_failure=on_failure)

    def _enqueue(self, *record: Any, **options: Any) -> None:
        with self._replacing:  # A record that entered a producer after its purge would never be reported.
            if not len(self._producer):
                self._heard = time.monotonic()
            super()._enqueue(*record, **options)

    def _acknowledge(self) -> None:
        super()._acknowledge()
        self._heard = time.monotonic()

    def _serve(self, call: Literal["poll", "flush"], timeout_s: float) -> int:
        if self._stranded:
            self._replace()
        elif time.monotonic() - self._heard > SILENT_S:
            self._heard = time.monotonic()
            if len(self._producer) and self._examination is None:
                # In a thread, because it takes seconds during an outage, and callers must not wait for it.
                self._examination = threading.Thread(target=self._examine, name="examine-producer", daemon=True)
                self._examination.start()
        return super()._serve(call, timeout_s)

    def _examine(self) -> None:
        try:
            self._stranded = stranded_clients.is_stranded(self._kafka, self._producer, self._topic())
        finally:
            self._examination = None

    def _replace(self) -> None:
        """Continue with a new producer, and report the records of the old one as not delivered."""
        with self._replacing:
            if not self._stranded:
                return
            event(logger, "client_stranded", level=logging.WARNING, topic=self._topic())
            stranded, self._producer = self._producer, self._new_producer()
            self._stranded, self._heard = False, time.monotonic()
        stranded.purge()
        stranded.flush(_REPORTS_S)

    def _topic(self) -> str:
        return next(iter(self._topics))

    def _cause(self, error: KafkaError) -> KafkaError:
        if error.code() in _PURGED and self._fatal is None:
            return KafkaError(KafkaError._MSG_TIMED_OUT, "the client had lost all brokers")
        return super()._cause(error)
