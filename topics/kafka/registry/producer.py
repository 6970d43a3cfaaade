"""A producer whose records carry the ids of their schemas in a registry; senders need not know about it."""

from collections.abc import Callable
from typing import Any

from confluent_kafka import Producer

from rollstream.topics.config import RegistryConfig
from rollstream.topics.kafka.named_producer import NamedProducer
from rollstream.topics.kafka.registry.ids import SchemaIds, schema_ids


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
