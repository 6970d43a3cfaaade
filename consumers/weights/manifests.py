"""Manifests of a run's policy versions, as read from `policies`.

A manifest lists all tensors and chunks of its version, so that the manifests of a long run do not fit into memory
together. Readers choose the versions of which they need the lists.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import RecordError
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.records import BEGINNING, KafkaRecord
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import PolicyManifest
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.keys import decode_key

Choice = Callable[[Mapping[int, PolicyManifest]], Collection[int]]
"""Chooses the versions whose manifests stay whole, given the manifests up to some place of the log."""
_AT_ONCE = 8
"""Number of further manifests to hold whole before the choice is made again."""


class Manifests(NamedTuple):
    """The newest manifest of each version of a run."""

    by_version: dict[int, PolicyManifest]
    unreadable: set[int]
    """Versions whose manifests are unreadable here, because a newer release wrote them or they are damaged."""
    skipped: SkippedRecords
    """Unreadable records."""


ROLLBACK_OF = "rollstream.rollback.of"
"""Header of the manifest of a rollback: the version whose parameters were published again."""


def committed_manifests(kafka: KafkaConfig, run: str, start: int = BEGINNING) -> Iterator[PolicyManifest]:
    """Yield all committed manifests at or above an offset of `policies`; skip unreadable records."""
    messages = read_to_end(kafka, topic_name(run, "policies"), start=start)
    return (manifest for _message, manifest in SkippedRecords("policies").records(PolicyManifest, messages))


def read_manifests(kafka: KafkaConfig, run: str, whole: Choice | None = None) -> dict[int, PolicyManifest]:
    """Return all committed manifests by version, as `read_policies` does."""
    return read_policies(kafka, run, whole).by_version


def read_policies(kafka: KafkaConfig, run: str, whole: Choice | None = None, *, logged: bool = True) -> Manifests:
    """Return all committed manifests; those of versions outside `whole` lack their tensors and chunks.

    Unreadable records are skipped, and reported in the log unless `logged` is False.
    """
    topic = topic_name(run, "policies")
    return manifests_in(lambda: read_to_end(kafka, topic), whole, logged=logged)


def manifests_in(read: Callable[[], Iterable[KafkaRecord]], whole: Choice | None, *, logged: bool = True) -> Manifests:
    """Return the manifests in the messages that `read` returns, as `read_policies` does.

    It is called again if a manifest is needed whole that an earlier choice did not keep.
    """
    chosen: Collection[int] = ()
    while True:
        manifests, keys, account = _Held(whole, chosen), set[bytes](), SkippedRecords("policies", logged=logged)
        for _message, manifest in account.records(PolicyManifest, _noted(read(), keys)):
            manifests.add(manifest)
        chosen = manifests.choose()
        if manifests.whole.issuperset(chosen):
            return Manifests(manifests.by_version, _unreadable(keys, manifests.by_version), account)


def none_whole(_manifests: Mapping[int, PolicyManifest]) -> Collection[int]:
    """Choose no version, for readers that need neither tensors nor chunks."""
    return ()


def shortened(manifest: PolicyManifest) -> PolicyManifest:
    """Return a manifest without its tensors and chunks."""
    return replace(manifest, tensors=(), chunks=())


def published_after(
    manifests: Iterable[PolicyManifest], learner: str, step: int, digest: str, recorded: int = -1
) -> PolicyManifest | None:
    """Return the manifest that a learner published after a step with these parameters; None if it published none.

    `digest` is the digest of the learner's parameters before any conversion. A rollback publishes the parameters of a
    step again: then the version is `recorded`, which the record of the step names, or the newest one if that is not a
    version of the step or has another digest.
    """
    of_step = {m.version: m for m in manifests if m.learner == learner and m.step == step}
    for version in (recorded, max(of_step, default=-1)):
        manifest = of_step.get(version)
        if manifest is not None and manifest.params_digest == digest:
            return manifest
    return None


def versions_of(keys: Iterable[bytes]) -> set[int]:
    """Versions in the keys of chunks or manifests; other programs may have written any key."""
    versions = set()
    for key in keys:
        with suppress(RecordError, ValueError, IndexError):
            versions.add(int(decode_key(key)[0]))
    return versions


class _Held:
    """Manifests of one pass over the topic."""

    def __init__(self, choice: Choice | None, chosen: Collection[int]) -> None:
        """`chosen` are versions to keep whole besides those that the choice names."""
        self.by_version: dict[int, PolicyManifest] = {}
        self.whole: set[int] = set()
        self._choice, self._chosen = choice, frozenset(chosen)
        self._most = _AT_ONCE

    def add(self, manifest: PolicyManifest) -> None:
        self.by_version[manifest.version] = manifest
        self.whole.add(manifest.version)
        if len(self.whole) > self._most:
            self.choose()
            self._most = len(self.whole) + _AT_ONCE

    def choose(self) -> set[int]:
        """Shorten all manifests outside the choice, and return the versions in it."""
        if self._choice is None:
            return set(self.whole)
        chosen = set(self._choice(self.by_version)) & self.by_version.keys()
        for version in self.whole - chosen - self._chosen:
            self.by_version[version] = shortened(self.by_version[version])
            self.whole.remove(version)
        return chosen


def _noted(messages: Iterable[KafkaRecord], keys: set[bytes]) -> Iterator[KafkaRecord]:
    """Yield the messages, and keep the keys that have a value in `keys`."""
    for message in messages:
        if message.key and message.value is not None:
            keys.add(message.key)
        elif message.key:
            keys.discard(message.key)
        yield message


def _unreadable(keys: Iterable[bytes], manifests: Collection[int]) -> set[int]:
    unreadable, newest = set[int](), max(manifests, default=-1)
    for version in sorted(versions_of(keys) - set(manifests)):
        # Versions have consecutive numbers, so that any other number is not that of a version.
        if 0 <= version <= newest + 1:
            unreadable.add(version)
            newest = max(newest, version)
    return unreadable
