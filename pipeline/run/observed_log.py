"""The log that an observer of a run reads: its topics, or another source of the same records."""

from collections.abc import Mapping
from typing import Any, Protocol

from rollstream.topics.closing import Closing
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.follower import TopicFollower
from rollstream.topics.kafka.records import KafkaRecord, Place
from rollstream.topics.wire.catalogue import topic_name

OBSERVED = ("rollouts", "journal", "batch-index", "steps", "policies", "metrics", "control")
"""Topics that an observer follows, by their names in the catalogue."""
_UNHURRIED: dict[str, Any] = {"fetch.min.bytes": 256 * 1024, "fetch.wait.max.ms": 250}


class ObservedLog(Protocol):
    """Records of the observed topics of a run, by the full names of the topics."""

    @property
    def ends(self) -> Mapping[Place, int]:
        """End offset of each partition that has been read to its end; transaction markers count."""
        ...

    def bounds(self) -> dict[Place, tuple[int, int]]:
        """First and end offset of each partition now."""
        ...

    def begin(self, starts: Mapping[Place, int]) -> None:
        """Read from these offsets on."""
        ...

    def poll(self, most: int, wait_s: float) -> list[KafkaRecord]:
        """Return up to `most` records; waits up to `wait_s` if there are none."""
        ...

    def close(self) -> None:
        """Release the resources of the log."""
        ...


class TopicLog(Closing):
    """The topics of a run. Steps are read once the batch index has been read to its end: an observer keeps a limited
    number of uses of batches that it does not know yet."""

    def __init__(self, kafka: KafkaConfig, run: str) -> None:
        """Raises TopicError if the run does not exist."""
        self._kafka, self._run = kafka, run
        there = topic_admin.topic_names(kafka)
        self._topics = [topic for name in OBSERVED if (topic := topic_name(run, name)) in there or name != "control"]
        self._follower: TopicFollower | None = None
        self._steps: dict[Place, int] = {}
        """Starts of the steps as long as they are not read."""

    @property
    def ends(self) -> Mapping[Place, int]:
        """End offset of each partition that has been read to its end."""
        return self._follower.ends if self._follower else {}

    def bounds(self) -> dict[Place, tuple[int, int]]:
        """First and end offset of each partition now."""
        return {
            (topic, p): bounds for topic in self._topics for p, bounds in topic_admin.bounds(self._kafka, topic).items()
        }

    def begin(self, starts: Mapping[Place, int]) -> None:
        """Read from these offsets on."""
        self._steps = {place: at for place, at in starts.items() if place[0] == topic_name(self._run, "steps")}
        at_once = {place: at for place, at in starts.items() if place not in self._steps}
        # Latency does not matter here: prefer a few large fetches to one for each record.
        self._follower = TopicFollower(self._kafka, at_once, **_UNHURRIED)

    def poll(self, most: int, wait_s: float) -> list[KafkaRecord]:
        """Return up to `most` records; waits up to `wait_s` if there are none."""
        if self._follower is None:
            return []
        if self._steps and (topic_name(self._run, "batch-index"), 0) in self._follower.caught_up:
            self._follower.add(self._steps)
            self._steps = {}
        return self._follower.poll(most, wait_s)

    def close(self) -> None:
        """Close the client."""
        if self._follower:
            self._follower.close()
