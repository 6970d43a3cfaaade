"""The bounds of a run's topics, and the error for a saved ledger that no longer matches the topics."""

from collections.abc import Mapping

from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import RollstreamError
from rollstream.topics.kafka import clients, topic_admin

LogBounds = dict[str, dict[int, int]]
"""One offset for each partition of each topic, by topic and partition."""


class Outdated(RollstreamError):
    """A saved ledger cannot be continued, because it does not match the topics or this release."""


def bounds_of(kafka: KafkaConfig, names: Mapping[str, str]) -> dict[str, dict[int, tuple[int, int]]]:
    """Return the first offset of each partition and the offset after its last, by the name given for each topic."""
    client = clients.admin(kafka)
    places = [(topic, p) for topic in names for p in range(topic_admin.partitions_of(kafka, topic, client))]
    begins, ends = (topic_admin.offsets(kafka, places, which) for which in ("earliest", "latest"))
    bounds: dict[str, dict[int, tuple[int, int]]] = {name: {} for name in names.values()}
    for topic, partition in places:
        place = topic, partition
        bounds[names[topic]][partition] = begins[place].offset, ends[place].offset
    return bounds
