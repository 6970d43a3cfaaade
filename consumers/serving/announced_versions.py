"""Announces the policy versions of a run, as their manifests appear, to engines that fetch the versions themselves."""

import asyncio
from pathlib import Path

from rollstream.consumers.serving.served_versions import ServedCheckpoint, ServedVersions
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka.follower import TopicFollower
from rollstream.topics.kafka.records import BEGINNING
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import PolicyManifest
from rollstream.topics.wire.catalogue import topic_name

_RECORDS = 500
KEPT = 8
"""Number of announced versions, so that an engine that cannot fetch the newest may load an earlier one."""


class VersionAnnouncer:
    """Announces the newest version of a run whose weights are on the log."""

    def __init__(self, kafka: KafkaConfig, run: str) -> None:
        """Open a consumer of the manifests. Raises TopicError or BrokerUnavailable."""
        self._place = topic_name(run, "policies"), 0
        self._policies = TopicFollower(kafka, {self._place: BEGINNING})
        self._latest: list[int] = []
        """The newest versions, in order."""
        self._skipped = SkippedRecords("serve-weights")

    async def poll(self, versions: ServedVersions, wait_s: float) -> int | None:
        """Announce the newest versions that are not announced yet, and return the newest of them, or None.

        The weights of early ones may be gone at the first call. Waits up to `wait_s` for records.
        """
        records = await asyncio.to_thread(self._policies.poll, _RECORDS, wait_s)
        manifests = [manifest for _record, manifest in self._skipped.records(PolicyManifest, records)]
        on_log = {manifest.version for manifest in manifests if manifest.kind != "external"}
        self._latest = sorted({*self._latest, *on_log})[-KEPT:]
        known = -1 if versions.newest is None else versions.newest.version
        new = [version for version in self._latest if version > known]
        if not new or self._place not in self._policies.caught_up:
            return None
        await versions.announce(*(ServedCheckpoint(version, Path()) for version in new))
        return new[-1]

    def close(self) -> None:
        """Close the consumer."""
        self._policies.close()
