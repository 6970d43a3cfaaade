"""WeightsPublisher: sends chunks outside transactions, then the manifest, which is the commit point of the version.

The manifest is committed in the transaction of its step. A version number is never reused. At the next start, chunks
left by a crash are tombstoned, and files left by a crash are reused or removed. In a learner of several processes, only
the lead has a WeightsPublisher: every other process sends its tensors itself, and the manifest waits for all of them.
"""

import logging
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from rollstream.consumers.weights.chains import lost, needed
from rollstream.consumers.weights.config import CHUNKS_AT_ONCE, WeightsConfig
from rollstream.consumers.weights.content import Arrays, root_of
from rollstream.consumers.weights.file_publisher import FilePublisher, FileWriter
from rollstream.consumers.weights.file_retention import remove_expired
from rollstream.consumers.weights.manifests import published_after, read_policies, shortened, versions_of
from rollstream.consumers.weights.shard_barrier import Channel, LeadBarrier
from rollstream.consumers.weights.shards import Shard, ShardWriter, draft, joined, planned
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.logs import event
from rollstream.topics.records import PolicyManifest
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key

logger = logging.getLogger(__name__)


class WeightsPublisher:
    """Publishes for one learner. Build it after the learner's StepLog, so that no other learner of the run can commit.

    Usage: call `stage`, write `record(manifest)` in the transaction of the step, then call `committed(manifest)`.
    """

    def __init__(
        self,
        kafka: KafkaConfig,
        run: str,
        learner: str,
        model: str,
        config: WeightsConfig,
        *,
        channel: Channel | None = None,
        expire: bool = True,
        first_version: int = 0,
    ) -> None:
        """`channel` connects to the other processes of the learner, each of which has a ShardMember.

        `first_version` is the number of the run's first version.

        Without `expire`, no other version's chunks and files are removed: a publisher that may have other settings than
        the learner leaves that to the learner.
        """
        self._config = config
        self._run, self._learner = run, learner
        self._model, self._first_version = model, first_version
        self._epoch = uuid.uuid4().hex[:12]
        self._weights_topic = topic_name(run, "weights")
        self._policies_topic = topic_name(run, "policies")
        policies = read_policies(kafka, run, partial(needed, versions=config.keep_versions))
        self._manifests, self._unreadable = policies.by_version, policies.unreadable
        self._expire = expire
        self._files: FilePublisher | None = None
        if config.url and expire:
            self._files = FilePublisher(run, config, self._manifests, self._unreadable)
        writer = FileWriter(run, config) if config.url and not expire else self._files
        self._writer = ShardWriter(kafka, run, config, writer)
        self._live = needed(self._manifests, config.keep_versions)
        """Versions whose chunks are not tombstoned."""
        self._staged: tuple[PolicyManifest, Arrays] | None = None
        self._base: tuple[PolicyManifest, Arrays] | None = None
        """The latest version, if this publisher made it, and the arrays of this process."""
        self._lost = set[int]()
        """Versions that nobody could fetch when this publisher started, if no later one could be fetched either."""
        if expire:
            incomplete = self._tombstone_unnamed(kafka).union(self._files.incomplete if self._files else ())
            self._lost = lost(self._manifests, self._live, incomplete)
        if self._lost:
            event(logger, "versions_lost", level=logging.WARNING, versions=sorted(self._lost))
        # This comes last, because the other processes may send chunks from now on.
        self._barrier = LeadBarrier(channel, self._epoch, config.shards_timeout_s)

    @property
    def versions(self) -> dict[int, int]:
        """Learner step of every published version; may be read from another thread."""
        return {version: manifest.step for version, manifest in list(self._manifests.items())}

    @property
    def latest_version(self) -> int:
        """Highest version published; before the first, the number before it. A version counts even if its manifest is
        unreadable here, because a newer release wrote it or it is damaged."""
        return max((*self._manifests, *self._unreadable), default=self._first_version - 1)

    @property
    def has_none(self) -> bool:
        """Whether the run has no version yet."""
        return not self._manifests and not self._unreadable

    def manifest(self, version: int) -> PolicyManifest | None:
        """Return the manifest of a published version; None if no version has that number."""
        return self._manifests.get(version)

    @property
    def newest_is_lost(self) -> bool:
        """Whether nobody can fetch the newest version, because chunks of it, or of a version that it builds on, are
        missing."""
        return self.latest_version in self._lost

    def published(self, step: int, digest: str, recorded: int = -1) -> PolicyManifest | None:
        """Return the manifest of the version that this learner published after `step`, if `digest` matches.

        `digest` is the digest of the learner's parameters before any conversion, and `recorded` the version in the
        record of the step, which the step keeps if a rollback has published its parameters again. A version does not
        count if nobody can fetch it or a later one, so that it is published again.
        """
        manifest = published_after(self._manifests.values(), self._learner, step, digest, recorded)
        return None if manifest is None or manifest.version in self._lost else manifest

    def stage(
        self,
        step: int,
        arrays: Arrays,
        *,
        params_digest: str = "",
        dtype: str = "",
        figures: Mapping[str, float] | None = None,
    ) -> PolicyManifest:
        """Send the chunks of a new version, wait until broker or store has them, and return the manifest to commit.

        `arrays` are numpy arrays by name, which must not change afterwards, because the next version is compared with
        them. If they were converted to `dtype`, `params_digest` is the digest of the parameters before the conversion.
        `figures` are the figures of earlier stages. Nobody reads the chunks before the manifest is committed. Raises
        DeliveryError if the broker or the store does not accept them.

        In a learner of several processes, `arrays` are the tensors of this process, and `params_digest` must be given.
        Raises ShardMissing unless all processes store their tensors in time.
        """
        clock, version, alone = _Stages(figures or {}), self.latest_version + 1, self._barrier.processes == 1
        base = self._before()
        self._barrier.begin(version, -1 if base is None else base[0].version)
        share = draft(arrays, None if base is None else base[1], alone=alone)
        clock.ended("compare_s")
        plan = planned(self._barrier.offers(share.offer), self._config)
        if not alone:
            clock.ended("barrier_s")
        self._barrier.plan(plan)
        sent = self._writer.send(share, plan, 0, version, self._epoch)
        clock.ended("send_s")
        shards = self._barrier.shards(sent)
        if not alone:
            clock.ended("barrier_s")
        tensors, chunks, digest = joined(shards)
        manifest = self._manifest(
            step,
            digest,
            kind="delta" if plan.delta else "full",
            base=self.latest_version if plan.delta else -1,
            tensors=tensors,
            chunks=chunks,
            params_digest=params_digest or digest,
            dtype=dtype,
            figures=clock.figures | _sizes(shards),
        )
        self._staged = manifest, arrays
        return manifest

    def skip(self) -> None:
        """Tell the other processes of the learner that nothing is published after this step."""
        self._barrier.skip()

    def _before(self) -> tuple[PolicyManifest, Arrays] | None:
        """Return the latest version if the next version may be a delta of it, otherwise None.

        The first version of a publisher, and every `anchor_every`-th version, must be full.
        """
        if self._base is None:
            return None
        base_version = self._base[0].version
        anchor = max(v for v, manifest in self._manifests.items() if manifest.kind == "full")
        if base_version != self.latest_version or base_version + 1 - anchor >= self._config.anchor_every:
            return None
        return self._base

    def stage_external(self, step: int, digest: str) -> PolicyManifest:
        """Return the manifest to commit for a new version whose parameters are not on the log."""
        return self._manifest(step, digest, kind="external", params_digest=digest)

    def _manifest(self, step: int, digest: str, **fields: Any) -> PolicyManifest:
        """Build the manifest of the version after the latest."""
        whole: dict[str, Any] = {"tensors": (), "chunks": ()} | fields
        return PolicyManifest(
            version=self.latest_version + 1,
            learner=self._learner,
            step=step,
            epoch=self._epoch,
            digest=digest,
            model=self._model,
            created=time.time(),
            **whole,
        )

    def record(self, manifest: PolicyManifest) -> tuple[str, bytes, bytes]:
        """Return the topic, key and value of the manifest's record."""
        return self._policies_topic, encode_key(manifest.version), encode(manifest)

    def committed(self, manifest: PolicyManifest) -> None:
        """Note that the manifest is committed, and remove the chunks of versions that no kept version builds on, unless
        `expire` is false."""
        self._manifests[manifest.version] = manifest
        self._live.add(manifest.version)
        staged, self._staged = self._staged, None
        keeps = self._config.anchor_every > 1 and staged is not None and staged[0] is manifest
        self._base = staged if keeps else None
        if self._expire:
            self._remove_expired(manifest)

    def _remove_expired(self, manifest: PolicyManifest) -> None:
        files: list[str] = []
        for version in sorted(self._live - needed(self._manifests, self._config.keep_versions)):
            expired = self._manifests[version]
            for chunk in expired.chunks:
                if chunk.url:
                    # A run restored under another name names files of the run it was copied from.
                    if root_of(self._run, chunk.url) is not None:
                        files.append(chunk.url)
                else:
                    self._writer.tombstone(encode_key(expired.version, expired.epoch, chunk.index), chunk.partition)
            self._live.remove(version)
            self._manifests[version] = shortened(expired)
        if self._files is not None:
            self._files.committed(manifest)
        remove_expired(files, self._config)

    def close(self) -> None:
        """Wait until the broker has received every tombstone."""
        self._writer.close()

    def _tombstone_unnamed(self, kafka: KafkaConfig) -> set[int]:
        """Tombstone chunks of versions no longer kept, and chunks that a crash left without a manifest, but none of a
        version whose manifest is unreadable here. Return the kept versions of which chunks are missing."""
        kept_chunks = {
            encode_key(manifest.version, manifest.epoch, chunk.index): chunk
            for version in self._live
            for manifest in (self._manifests[version],)
            for chunk in manifest.chunks
        }
        chunks = read_to_end(kafka, self._weights_topic, isolation="read_uncommitted", at_once=CHUNKS_AT_ONCE)
        live = _live_keys(chunks)
        unknown = {key for key in live if self._unreadable and versions_of((key,)) & self._unreadable}
        removed = {key: partition for key, (partition, _) in live.items() if key not in kept_chunks.keys() | unknown}
        for key, partition in removed.items():
            self._writer.tombstone(key, partition)
        self._writer.flush()
        if removed:
            event(logger, "chunks_tombstoned", chunks=len(removed), versions=sorted(versions_of(removed)))
        on_log = {key: (chunk.partition, chunk.offset) for key, chunk in kept_chunks.items() if not chunk.url}
        return versions_of(key for key, place in on_log.items() if live.get(key) != place)


class _Stages:
    """Seconds of the stages of a publication, one after another."""

    def __init__(self, earlier_figures: Mapping[str, float]) -> None:
        self.figures = dict(earlier_figures)
        self._began = time.monotonic()

    def ended(self, stage: str) -> None:
        """Add the time since the previous call to the seconds of `stage`, which may have several parts."""
        now = time.monotonic()
        self.figures[stage] = self.figures.get(stage, 0.0) + now - self._began
        self._began = now


def _sizes(shards: Sequence[Shard]) -> dict[str, float]:
    of_each = [shard.full_bytes for shard in shards]
    several = {"processes": float(len(shards)), "largest_shard_bytes": float(max(of_each))}
    return {
        "full_bytes": float(sum(of_each)),
        "content_bytes": float(sum(shard.content_bytes for shard in shards)),
        "stored_bytes": float(sum(chunk.size_bytes for shard in shards for chunk in shard.chunks)),
        **(several if len(shards) > 1 else {}),
    }


def _live_keys(messages: Iterable[KafkaRecord]) -> dict[bytes, tuple[int, int]]:
    """Return the keys whose last record is not a tombstone, with the partition and offset of that record."""
    live: dict[bytes, tuple[int, int]] = {}
    for message in messages:
        key = message.key
        if key is None:
            continue
        if message.value is None:
            live.pop(key, None)
        else:
            live[key] = message.partition, message.offset
    return live
