"""Announces the policy versions of a run, as their manifests appear, to engines that fetch the versions themselves."""

import asyncio
from pathlib import Path

from rollstream.consumers.serving.served_versions import ServedCheckpoint, ServedVersions
from rollstream.topics.catalogue import topic_name
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka.follower import TopicFollower
from rollstream.topics.kafka.records import BEGINNING
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import PolicyManifest

_RECORDS = 500


class VersionAnnouncer:
    """Announces the newest version of a run whose weights are on the log."""

    def __init__(self, kafka: KafkaConfig, run: str) -> None:
        """Open a consumer of the manifests. Raises TopicError or BrokerUnavailable."""
        self._place = topic_name(run, "policies"), 0
        self._policies = TopicFollower(kafka, {self._place: BEGINNING})
        self._newest = -1
        self._skipped = SkippedRecords("serve-weights")

    async def poll(self, versions: ServedVersions, wait_s: float) -> int | None:
        """Announce the newest version if it is not announced yet, and return it; return None if no version is new.

        The first call that returns a version announces only the newest one on the log, because the weights of earlier
        versions may be gone. Waits up to `wait_s` for records.
        """
        records = await asyncio.to_thread(self._policies.poll, _RECORDS, wait_s)
        manifests = [manifest for _record, manifest in self._skipped.records(PolicyManifest, records)]
        known = -1 if versions.newest is None else versions.newest.version
        self._newest = max([self._newest, *(m.version for m in manifests if m.kind != "external")])
        if self._newest <= known or self._place not in self._policies.caught_up:
            return None
        await versions.announce(ServedCheckpoint(self._newest, Path()))
        return self._newest

    def close(self) -> None:
        """Close the consumer."""
        self._policies.close()
