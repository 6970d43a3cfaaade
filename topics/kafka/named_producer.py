"""A producer that knows the user of its connection, so that errors can name the user."""

from typing import Any

from confluent_kafka import Producer


class NamedProducer(Producer):
    """A producer with its user, which is empty if the settings name none, as with a certificate or a token."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self.user = str(settings.get("sasl.username", ""))


def user_of(producer: Producer) -> str:
    """Return the user of a producer; empty if it is not known."""
    return producer.user if isinstance(producer, NamedProducer) else ""
