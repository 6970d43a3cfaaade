"""Partitions of a topic, and how long brokers keep its records: asked again and again, because operators change both.

No call waits for a broker: the answer to a request is taken by a later call.
"""

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaException, TopicCollection

from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka import clients, topic_admin

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient

EVERY_S = 60.0
"""Time between two requests."""


class TopicWatch:
    """Knows the number of partitions of one topic, and how long brokers keep its records.

    As long as no broker answers, the previous answer stands.
    """

    def __init__(self, kafka: KafkaConfig, topic: str, clock: Callable[[], float] = lambda: time.monotonic()) -> None:
        self._kafka, self._topic, self._clock = kafka, topic, clock
        # One client for all requests, because the end of a client may wait for a name server.
        self._client: AdminClient | None = None
        self._settings: Future[Any] | None = None
        self._description: Future[Any] | None = None
        self._due_s = clock()
        self.retention_s = math.inf
        """Infinite if brokers keep records forever, before the first answer, and for a user who may not see it."""
        self.partitions = 0
        """0 before the first answer."""

    def poll(self) -> None:
        """Take the newest answers, and ask again if it is time to. Call it often."""
        if self._settings is not None and self._settings.done():
            with suppress(KafkaException):
                self.retention_s = topic_admin.retention_in(self._settings.result())
            self._settings = None
        if self._description is not None and self._description.done():
            with suppress(KafkaException):
                self.partitions = len(self._description.result().partitions)
            self._description = None
        if not (self._settings or self._description) and self._clock() >= self._due_s:
            self._due_s = self._clock() + EVERY_S
            self._client = self._client or clients.admin(self._kafka)
            self._settings = topic_admin.request_settings(self._client, self._topic)
            self._description = self._client.describe_topics(TopicCollection([self._topic]))[self._topic]
