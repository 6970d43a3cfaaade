"""Ids of our schemas in a registry, for writers, and the producer whose records carry them.

At most the first record of a schema in a topic waits for the registry: a writer that has no id yet writes the record
without one, which every reader of rollstream accepts; the id is requested again in the background. An unavailable
registry therefore neither stops a process nor loses a record.
"""

import logging
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

from confluent_kafka import Producer

from rollstream.topics.config import RegistryConfig
from rollstream.topics.errors import RegistryUnavailable, RollstreamError, SchemaRefused
from rollstream.topics.kafka.clients import NamedProducer
from rollstream.topics.kafka.registry.client import RegistryClient, Subject, subject_of, subjects_of
from rollstream.topics.logs import event
from rollstream.topics.wire.catalogue import run_and_name
from rollstream.topics.wire.codec import HEADER_SIZE, MAGIC, frame_of, framed_for_registry, schema_of

logger = logging.getLogger(__name__)

_ASK_AGAIN_S = 5.0
_Key = tuple[str, bytes]
"""Full name of a topic, and the fingerprint of a schema."""


class SchemaIds:
    """The ids of one registry, for all threads of a process."""

    def __init__(self, config: RegistryConfig, ask_again_s: float = _ASK_AGAIN_S) -> None:
        """Raises ConfigurationError as RegistryClient does."""
        self._config, self._ask_again_s = config, ask_again_s
        self._client = RegistryClient(config)
        self._ids: dict[_Key, int] = {}
        self._wanted: dict[_Key, Subject] = {}
        """Ids that the background thread requests."""
        self._unanswered: set[_Key] = set()
        """Ids that were not known when a record needed them."""
        self._away = False
        self._lock = threading.Lock()
        self._asking: threading.Thread | None = None

    def framed(self, topic: str, value: bytes) -> bytes:
        """Return a value as it is written to a topic: a record gets the id of its schema, if the id is known.

        Raises SchemaRefused if this process has no id yet and the registry lacks the schema or refuses the client; this
        means that the run is not set up.
        """
        frame = frame_of(value)
        known = self._ids.get((topic, frame[len(MAGIC) : HEADER_SIZE]))
        if known is None:
            known = self._first_id(topic, frame)
        return value if known is None else framed_for_registry(frame, known)

    def _first_id(self, topic: str, frame: bytes) -> int | None:
        schema = schema_of(frame)
        subject = None if schema is None else subject_of(self._config, topic, schema.record)
        if schema is None or subject is None:
            return None
        key = topic, schema.fingerprint
        with self._lock:
            if key in self._ids:
                return self._ids[key]
            if not self._away and key not in self._unanswered:
                try:
                    first = not self._ids
                    self._ids[key] = self._client.id_of(subject, schema)
                    if first:
                        self._want_all(topic)
                    return self._ids[key]
                except RegistryUnavailable as error:
                    self._away = True
                    self._tell(subject, error)
                except SchemaRefused as error:
                    if not self._ids:
                        raise
                    self._tell(subject, error)
            # Later records with this schema are written without waiting for an answer.
            self._unanswered.add(key)
            self._want(key, subject)
            return None

    def _tell(self, subject: Subject, error: RollstreamError) -> None:
        event(
            logger,
            "schema_id_unknown",
            level=logging.WARNING,
            topic=subject.topic,
            record=subject.record,
            error=str(error),
            meanwhile="records are written without an id; rollstream reads them, stock tools do not",
        )

    def _want_all(self, topic: str) -> None:
        """Request all ids that this run may need later, in the background while the registry is available."""
        run, _name = run_and_name(topic) or ("", "")
        for subject in subjects_of(self._config, run):
            self._want((subject.topic, subject.versions[-1].fingerprint), subject)

    def _want(self, key: _Key, subject: Subject) -> None:
        if key not in self._ids:
            self._wanted[key] = subject
        if self._wanted and self._asking is None:
            self._asking = threading.Thread(target=self._ask_on, name="schema-ids", daemon=True)
            self._asking.start()

    def _ask_on(self) -> None:
        while True:
            with self._lock:
                wanted = list(self._wanted.items())
                if not wanted:
                    self._asking = None
                    return
            for key, subject in wanted:
                if not self._ask(key, subject):
                    break
            if self._wanted:
                time.sleep(self._ask_again_s)

    def _ask(self, key: _Key, subject: Subject) -> bool:
        """Ask for one id; return whether the registry answers."""
        schema = next(schema for schema in subject.versions if schema.fingerprint == key[1])
        try:
            number = self._client.id_of(subject, schema)
        except SchemaRefused:
            with self._lock:
                self._away = False
                if key not in self._unanswered:
                    del self._wanted[key]  # The next record that needs this id requests it again.
            return True
        except RegistryUnavailable:
            with self._lock:
                self._away = True
            return False
        with self._lock:
            self._away = False
            self._ids[key] = number
            del self._wanted[key]
            if key in self._unanswered:
                event(logger, "schema_id_known", topic=subject.topic, record=subject.record, schema_id=number)
        return True


@cache
def schema_ids(config: RegistryConfig) -> SchemaIds:
    """Return the ids that all writers of this process share."""
    return SchemaIds(config)


class RegistryProducer(NamedProducer):
    """A producer that puts the id of its schema before each of our records, just before the record is sent."""

    def __init__(self, settings: dict[str, Any], ids: SchemaIds) -> None:
        super().__init__(settings)
        self._ids = ids

    def produce(self, topic: str, value: Any = None, *args: Any, **more: Any) -> None:
        """Queue a record, as the client does. Raises SchemaRefused as `SchemaIds.framed` does."""
        framed = self._ids.framed(topic, value) if isinstance(value, bytes) else value
        super().produce(topic, framed, *args, **more)


def registry_producer(config: RegistryConfig) -> Callable[[dict[str, Any]], Producer]:
    """Return a function from a client's settings to a producer. Raises ConfigurationError as RegistryClient does."""
    ids = schema_ids(config)
    return lambda settings: RegistryProducer(settings, ids)
