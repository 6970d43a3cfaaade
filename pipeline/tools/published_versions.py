"""Policy versions of a run as tools list them, and whether their chunks are still on the log or in a store.

A manifest lists all tensors and chunks of its version, and those of a long run do not fit into memory together. So
manifests are read one after the other, and once more to find their chunks.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from rollstream.consumers.weights.chains import ChainBroken, needed, with_bases
from rollstream.consumers.weights.config import CHUNKS_AT_ONCE
from rollstream.consumers.weights.content import ChunksGone, ChunksLate, WeightsRefused, folder_of, place_of
from rollstream.consumers.weights.fetcher import ChunkFetcher
from rollstream.consumers.weights.file_retention import listed_files
from rollstream.consumers.weights.manifests import Manifests, read_policies, shortened
from rollstream.consumers.weights.rollback import RollbackNote, note_of
from rollstream.pipeline.command_line.plain_values import tell
from rollstream.pipeline.config import RunConfig
from rollstream.topics.errors import ConfigurationError, TopicError
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.open_transactions import await_markers
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import PolicyManifest
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.keys import encode_key

THERE, EXPIRING, GONE, UNLISTED = "there", "expiring", "gone", "unlisted"
"""States of a version's chunks: there; there, but tombstoned; gone; and in a store that does not answer or is not
mounted. If only some are gone, the state is their number and the word gone."""


@dataclass(frozen=True)
class PublishedVersion:
    """A version on record."""

    manifest: PolicyManifest
    """Without tensors and chunks, unless the reader asked for them."""
    rollback: RollbackNote | None
    size_bytes: int
    """Size of its chunks."""
    chunks: int
    """Number of its chunks."""
    dtypes: str
    """Names of its tensors' dtypes, joined by +."""
    stores: frozenset[str]
    """URLs of the stores that have chunks of it."""
    folders: frozenset[tuple[str, str]]
    """Folders of its files: URLs of stores and names of runs. A restored run names files of the run it was copied
    from."""


class PublishedVersions:
    """Versions of a run on record when this was built.

    Building it and `chunk_states` raise TopicError if a topic is missing, and BrokerUnavailable.
    """

    def __init__(self, config: RunConfig, whole: Collection[int] = ()) -> None:
        """`whole` are versions whose manifests keep their tensors and chunks."""
        self.by_number: dict[int, PublishedVersion] = {}
        self.skipped = SkippedRecords(logged=False)
        """Unreadable records of `policies`."""
        self._config, self._whole = config, whole
        await_markers(config.kafka, topic_name(config.run, "policies"))
        self._read()

    def chunk_states(self) -> dict[int, str]:
        """Return the state of each version's chunks, one of this module's constants or, for example, `3 gone`.

        Reads `weights` without keeping values, and lists the files in stores.
        """
        stored = files_in_stores(self.by_number, self._config.learner.weights.store_timeout_s)
        on_log = self._chunks_on_log()
        states = dict.fromkeys(self.by_number, GONE)
        for _message, manifest in SkippedRecords(logged=False).records(PolicyManifest, self._messages()):
            if manifest.version in states:
                states[manifest.version] = _state(manifest, stored, on_log)
        return states

    def _messages(self) -> Iterator[KafkaRecord]:
        return read_to_end(self._config.kafka, topic_name(self._config.run, "policies"))

    def _read(self) -> None:
        """Read each manifest, and keep what a list of versions shows."""
        for message, manifest in self.skipped.records(PolicyManifest, self._messages()):
            self.by_number[manifest.version] = PublishedVersion(
                manifest if manifest.version in self._whole else shortened(manifest),
                note_of(message),
                sum(chunk.size_bytes for chunk in manifest.chunks),
                len(manifest.chunks),
                "+".join(sorted({tensor.dtype for tensor in manifest.tensors})),
                frozenset(place_of(chunk.url)[0] for chunk in manifest.chunks if chunk.url),
                frozenset(folder for chunk in manifest.chunks if (folder := folder_of(chunk.url)) is not None),
            )

    def _chunks_on_log(self) -> "_ChunksOnLog":
        chunks = _ChunksOnLog({}, set())
        topic = topic_name(self._config.run, "weights")
        for record in read_to_end(self._config.kafka, topic, isolation="read_uncommitted", at_once=CHUNKS_AT_ONCE):
            if record.key is None:
                continue
            if record.value is None:
                chunks.tombstoned.add(record.key)
            else:
                chunks.keys[record.partition, record.offset] = record.key
        return chunks


class FilesInStores(NamedTuple):
    """The files in the folders that the manifests of a run name."""

    sizes: dict[str, int]
    """Size in bytes by URL."""
    unlisted: set[tuple[str, str]]
    """Folders of stores that did not answer or are not mounted: URLs of stores and names of runs."""


def files_in_stores(versions: Mapping[int, PublishedVersion], timeout_s: float) -> FilesInStores:
    """List the files in the folders of versions, each within `timeout_s`."""
    # A learner keeps the newest version and those that it builds on, whatever its settings are.
    newest = needed({number: version.manifest for number, version in versions.items()}, 1)
    in_use = {folder for number in newest for folder in versions[number].folders}
    files = FilesInStores({}, set())
    for url, run in sorted({folder for version in versions.values() for folder in version.folders}):
        used = [url] if (url, run) in in_use else []
        listed = listed_files(run, [url], timeout_s=timeout_s, in_use=used)[url]
        if isinstance(listed, str):
            files.unlisted.add((url, run))
        else:
            files.sizes.update({f"{url.rstrip('/')}/{name}": file.size_bytes for name, file in listed.items()})
    return files


class _ChunksOnLog(NamedTuple):
    keys: dict[tuple[int, int], bytes]
    """Key of each chunk by partition and offset."""
    tombstoned: set[bytes]
    """Keys of tombstones."""


def _state(manifest: PolicyManifest, stored: FilesInStores, on_log: _ChunksOnLog) -> str:
    there, expiring = 0, False
    for chunk in manifest.chunks:
        if chunk.url:
            if folder_of(chunk.url) in stored.unlisted:
                return UNLISTED
            there += stored.sizes.get(chunk.url) == chunk.size_bytes
        else:
            key = encode_key(manifest.version, manifest.epoch, chunk.index)
            there += on_log.keys.get((chunk.partition, chunk.offset)) == key
            expiring |= key in on_log.tombstoned
    gone = len(manifest.chunks) - there
    if not gone:
        return EXPIRING if expiring else THERE
    return GONE if not there else f"{gone} gone"


def read_whole(config: RunConfig, *versions: int) -> dict[int, PolicyManifest]:
    """Return all manifests by version as `manifests` does, and report skipped records.

    Raises ConfigurationError if one of `versions` does not exist.
    """
    clients.check_broker(config.kafka)
    found = manifests(config, *versions)
    tell(found.skipped)
    check_published(config, found.by_version, *versions)
    return found.by_version


def manifests(config: RunConfig, *versions: int) -> Manifests:
    """Return all manifests; those of `versions`, and of the versions that they build on, are whole."""

    def whole(known: Mapping[int, PolicyManifest]) -> set[int]:
        return with_bases(known, *(version for version in versions if version in known))

    await_markers(config.kafka, topic_name(config.run, "policies"))
    return read_policies(config.kafka, config.run, whole, logged=False)


def check_published(config: RunConfig, published: Collection[int], *versions: int) -> None:
    """Raise ConfigurationError if one of the versions does not exist."""
    for number in versions:
        if number not in published:
            raise ConfigurationError(
                f"run {config.run} has no policy version {number}; `rollstream weights ls --run {config.run}` lists "
                "its versions"
            )


@contextmanager
def fetching(config: RunConfig, version: int) -> Iterator[ChunkFetcher]:
    """Yield a fetcher for a version. Raises TopicError, with the reason, if the version cannot be fetched whole."""
    try:
        with ChunkFetcher(config.kafka, config.run, files_at_once=config.learner.weights.files_at_once) as fetcher:
            yield fetcher
    except (ChainBroken, ChunksGone, ChunksLate, WeightsRefused) as error:
        raise TopicError(
            f"policy version {version} of run {config.run} cannot be fetched: {error}; "
            f"`rollstream weights ls --run {config.run}` lists the versions that are there"
        ) from error
