"""Policy versions of a run by the labels of weights: the version behind a label, and the learner step behind a version.

Engines name weights by strings. A label that is a number is the policy version; other labels are looked up in the
manifests on `policies`. A server that follows a run samples only with weights whose manifest it has read there.
"""

import threading
import time
from collections.abc import Collection
from typing import Protocol

from rollstream.topics.closing import Closing
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka.follower import TopicFollower
from rollstream.topics.kafka.records import BEGINNING
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import PolicyManifest
from rollstream.topics.wire.catalogue import topic_name

UNKNOWN = -1
_POLL_S = 0.05
_LONGEST_READ_S = 30.0


class PolicyVersions:
    """Versions on record. Pure."""

    def __init__(self) -> None:
        self.steps: dict[int, int] = {}
        """Learner step of each version."""
        self._versions: dict[str, int] = {}

    def add(self, manifest: PolicyManifest) -> None:
        """Add a version under its labels: its number, its digest, and LEARNER/STEP."""
        self.steps[manifest.version] = manifest.step
        for label in (manifest.digest, f"{manifest.learner}/{manifest.step}"):
            self._versions[label] = manifest.version

    def version_of(self, label: str) -> int:
        """Return the policy version that a label names, -1 if unknown. A number counts even if it is not on record."""
        if label.isascii() and label.isdecimal() and len(label) < 19:
            return int(label)
        return self._versions.get(label, UNKNOWN)

    def step_of(self, version: int) -> int:
        """Return the learner step of a version, -1 if it is not on record."""
        return self.steps.get(version, UNKNOWN)

    def lacks(self, labels: Collection[str]) -> bool:
        """Whether any of the labels names no version on record."""
        return any(self.version_of(label) not in self.steps for label in labels)


class PolicySource(Protocol):
    """Gives the versions that labels of weights name."""

    @property
    def versions(self) -> PolicyVersions:
        """Versions read so far."""

    def read(self, wait_s: float) -> PolicyVersions:
        """Read new manifests, and return all versions."""


class NoPolicies:
    """Policy versions without a run: only labels that are numbers name a version."""

    def __init__(self) -> None:
        self.versions = PolicyVersions()

    def read(self, _wait_s: float) -> PolicyVersions:
        """Return an empty PolicyVersions."""
        return self.versions


class PolicyFollower(Closing):
    """Follows the manifests of a run; any thread may read."""

    def __init__(self, kafka: KafkaConfig, run: str) -> None:
        """Start at the beginning of `policies`. Raises TopicError, BrokerUnavailable."""
        self.versions = PolicyVersions()
        self.skipped = SkippedRecords("policy-follower")
        """Manifests that could not be read."""
        self._place = topic_name(run, "policies"), 0
        self._follower = TopicFollower(kafka, {self._place: BEGINNING})
        self._lock = threading.Lock()

    def read(self, wait_s: float = _POLL_S) -> PolicyVersions:
        """Read to the end of the topic; at the end, wait up to `wait_s` for another manifest. Return all versions."""
        deadline = time.monotonic() + _LONGEST_READ_S
        with self._lock:
            # A learner may publish more often than every `wait_s`, so stop at the end of the topic, not at a pause.
            while messages := self._follower.poll(500, wait_s):
                for _message, manifest in self.skipped.records(PolicyManifest, messages):
                    self.versions.add(manifest)
                if self._place in self._follower.ends or time.monotonic() > deadline:
                    break
        return self.versions

    def await_labels(self, labels: Collection[str], timeout_s: float) -> bool:
        """Read until every label names a version on record; return whether all do within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self.versions.lacks(labels) and time.monotonic() < deadline:
            self.read()
        return not self.versions.lacks(labels)

    def close(self) -> None:
        """Close the consumer."""
        with self._lock:
            self._follower.close()
