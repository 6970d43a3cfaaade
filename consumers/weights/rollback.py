"""Rollback: publishes the parameters of an earlier policy version again, under the next number.

Version numbers are never reused, so every follower swaps forward to the new version. The headers of the manifest's
record say who rolled back, and why.
"""

import getpass
import socket
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import NamedTuple

from rollstream.consumers.weights.chains import ChainBroken, links, load_version, needed, with_bases
from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.content import ChunksGone, ChunksLate, WeightsRefused, place_of
from rollstream.consumers.weights.fetcher import ChunkFetcher
from rollstream.consumers.weights.manifests import ROLLBACK_OF, read_manifests
from rollstream.consumers.weights.publisher import WeightsPublisher
from rollstream.consumers.weights.step_log import StepLog
from rollstream.topics.config import KafkaConfig
from rollstream.topics.decimal_numbers import decimal_number
from rollstream.topics.errors import ConfigurationError, TopicError
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.records import PolicyManifest

PUBLISHER = "rollback"
"""Name under which a rollback acquires the right to publish; the version keeps the name of its learner."""
_BY, _REASON = "rollstream.rollback.by", "rollstream.rollback.reason"


class RollbackNote(NamedTuple):
    """A rollback's note in the record of the version that it published."""

    source: int
    """Version whose parameters were published again."""
    by: str
    reason: str


def note_of(record: KafkaRecord) -> RollbackNote | None:
    """Return the rollback's note in the record of a manifest; None if a learner published the manifest."""
    source = decimal_number(record.header(ROLLBACK_OF) or "")
    if source is None:
        return None
    return RollbackNote(source, record.header(_BY) or "", record.header(_REASON) or "")


def roll_back(
    kafka: KafkaConfig,
    run: str,
    version: int,
    *,
    reason: str,
    by: str = "",
    take_over: bool = False,
    config: WeightsConfig | None = None,
) -> PolicyManifest:
    """Publish the parameters of `version` as the next version, and return its manifest.

    `by` defaults to the user and host of this process. `take_over` fences the learner that publishes into the run;
    without it, a rollback is refused unless that learner is retired. No other version is removed. Raises
    ConfigurationError if there is no such version, TopicError if it cannot be fetched whole, StateRefused, Fenced,
    DeliveryError and BrokerUnavailable.
    """
    config = config or WeightsConfig()
    manifests = read_manifests(kafka, run, lambda known: needed(known, 1) | with_bases(known, version))
    if version not in manifests:
        raise ConfigurationError(f"run {run} has no policy version {version}; `rollstream weights ls` lists them")
    source = manifests[version]
    # The version is fetched before any learner is fenced.
    with ChunkFetcher(kafka, run, files_at_once=config.files_at_once) as fetcher:
        try:
            arrays = load_version(fetcher, manifests, version, timeout_s=config.fetch_timeout_s)
            config = placed(config, manifests, version)
        except ChunksLate as late:
            raise TopicError(f"policy version {version} cannot be published again: {late}") from late
        except (ChainBroken, ChunksGone, WeightsRefused) as error:
            fault = "damaged" if isinstance(error, WeightsRefused) else "missing"
            raise TopicError(unfetchable(run, version, fault, manifests, config.keep_versions)) from error
    with ExitStack() as stack:
        # The log must be built first, because building it fences the learner.
        log = stack.enter_context(closing(StepLog(kafka, run, PUBLISHER, take_over=take_over)))
        # The learner may keep more versions than `config`, so it removes what has expired when it starts again.
        publisher = WeightsPublisher(kafka, run, source.learner, source.model, config, expire=False)
        stack.enter_context(closing(publisher))
        manifest = publisher.stage(source.step, arrays, params_digest=source.params_digest, dtype=source.dtype)
        log.commit([publisher.record(manifest)], headers=_headers(version, by or _user(), reason))
        publisher.committed(manifest)
    return manifest


def unfetchable(run: str, version: int, fault: str, manifests: Mapping[int, PolicyManifest], keep_versions: int) -> str:
    """Return why a version cannot be published again, and which versions and commands remain.

    The errors of a fetch do not say this: they name a chunk or a file, and remedies for readers of the newest version.
    """
    others = sorted(needed(manifests, keep_versions) - {version})
    return (
        f"policy version {version} of run {run} cannot be published again: its weights, or those of a version that it "
        f"builds on, are {fault}. Other versions that are kept with learner.weights.keep_versions {keep_versions}: "
        f"{', '.join(map(str, others)) or 'none'}; `rollstream weights verify --run {run}` checks them. Raise "
        "keep_versions to keep more versions in future; `rollstream fork` continues training from an older step"
    )


def placed(config: WeightsConfig, manifests: Mapping[int, PolicyManifest], version: int) -> WeightsConfig:
    """Return settings that store a version in files where its own files are, unless `config` says where to store it.

    A rollback may be run without the learner's settings, and versions in files are too large for the log. Raises
    ChainBroken.
    """
    stores = [place_of(chunk.url)[0] for link in links(manifests, version) for chunk in link.chunks if chunk.url]
    if config.url or config.transport == "log" or not stores:
        return config
    return replace(config, transport="files", url=stores[-1])


def _headers(version: int, by: str, reason: str) -> Mapping[str, str]:
    return {ROLLBACK_OF: str(version), _BY: by, _REASON: reason}


def _user() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in containers
        user = "unknown"
    return f"{user}@{socket.gethostname()}"
