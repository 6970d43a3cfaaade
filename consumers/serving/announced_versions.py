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
    """The newest version of a run whose weights are on the log."""

    def __init__(self, kafka: KafkaConfig, run: str) -> None:
        """Raises TopicError or BrokerUnavailable."""
        self._policies = TopicFollower(kafka, {(topic_name(run, "policies"), 0): BEGINNING})
        self._skipped = SkippedRecords("serve-weights")

    async def poll(self, versions: ServedVersions, wait_s: float) -> int | None:
        """Announce the newest version of those that appeared; return it, or None if none appeared for `wait_s`."""
        records = await asyncio.to_thread(self._policies.poll, _RECORDS, wait_s)
        manifests = [manifest for _record, manifest in self._skipped.records(PolicyManifest, records)]
        known = -1 if versions.newest is None else versions.newest.version
        newest = max((m.version for m in manifests if m.kind != "external"), default=-1)
        if newest <= known:
            return None
        await versions.announce(ServedCheckpoint(newest, Path()))
        return newest

    def close(self) -> None:
        """Close the consumer."""
        self._policies.close()
