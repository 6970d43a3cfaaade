"""How long brokers keep the records of a topic, asked again and again, because operators change it while a run goes on.

No call waits for a broker: the answer to a request is taken by a later call.
"""

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaException

from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka import clients, topic_admin

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient

EVERY_S = 60.0
"""Time between two requests."""


class RetentionWatch:
    """Knows how long brokers keep a record of one topic."""

    def __init__(self, kafka: KafkaConfig, topic: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._kafka, self._topic, self._clock = kafka, topic, clock
        # One client for all requests, because the end of a client may wait for a name server.
        self._client: AdminClient | None = None
        self._asked: Future[Any] | None = None
        self._due_s = clock()
        self._newest_s = math.inf

    def newest_s(self) -> float:
        """Return the newest answer, and ask again if it is time to.

        It is infinite if brokers keep records forever, before the first answer, and for a user who may not see it. As
        long as no broker answers, the previous answer stands.
        """
        if self._asked is not None and self._asked.done():
            with suppress(KafkaException):
                self._newest_s = topic_admin.retention_in(self._asked.result())
            self._asked = None
        if self._asked is None and self._clock() >= self._due_s:
            self._due_s = self._clock() + EVERY_S
            self._client = self._client or clients.admin(self._kafka)
            self._asked = topic_admin.request_settings(self._client, self._topic)
        return self._newest_s
