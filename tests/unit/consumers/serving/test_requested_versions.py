"""Versions that an engine requests: each request is answered, in bounded memory, whatever was requested before."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from rollstream.consumers.serving.vllm_plugin import requested_versions
from rollstream.consumers.serving.vllm_plugin.requested_versions import RequestedVersions
from rollstream.consumers.weights.content import ChunksLate, WeightsRefused
from rollstream.topics.closing import Closing
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import TopicError
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.records import PolicyManifest, Tensor
from rollstream.topics.wire.codec import encode
from tests.support.log_lines import log_lines
from tests.support.waiting import eventually

FULL_EVERY = 10


def record(version: int, tensors: tuple[str, ...]) -> KafkaRecord:
    manifest = PolicyManifest(
        version=version,
        learner="l",
        step=version,
        epoch="e",
        tensors=tuple(
            Tensor(name=name, dtype="float32", shape=(1,), start=0, size_bytes=4, digest="") for name in tensors
        ),
        chunks=(),
        digest="",
        kind="delta" if version % FULL_EVERY else "full",
        base=version - 1 if version % FULL_EVERY else -1,
    )
    return KafkaRecord("main.policies", 0, version, value=encode(manifest))


class Log:
    """Manifests of versions, of which one poll returns a few; and what was loaded from them."""

    def __init__(self) -> None:
        self.versions = 0
        self.opened = self.closed = 0
        """Numbers of followers that were opened and closed."""
        self.failing = False
        """Whether the next follower that is polled is from then on useless."""
        self.unloadable: set[int] = set()
        self.damaged: set[int] = set()
        self.most_known = 0
        """Largest number of manifests among which a version was sought."""
        self.tensors: tuple[str, ...] = ()
        """Names of the tensors of each version."""

    def load_version(self, _: Any, manifests: Mapping[int, PolicyManifest], version: int, **__: Any) -> dict[str, Any]:
        self.most_known = max(self.most_known, len(manifests))
        if version in self.unloadable:
            raise ChunksLate(f"version {version} is late")
        if version in self.damaged:
            raise WeightsRefused(f"version {version} is damaged")
        return {}


class Follower(Closing):
    def __init__(self, log: Log) -> None:
        self._log, self._at, self._failed = log, 0, False
        log.opened += 1

    @property
    def caught_up(self) -> bool:
        return self._at == self._log.versions

    def poll(self, most: int, wait_s: float) -> list[KafkaRecord]:
        if self._log.failing:
            self._log.failing, self._failed = False, True
            raise TopicError("the position is no longer in the log")
        begin, end = self._at, min(self._log.versions, self._at + FULL_EVERY)
        self._at = end
        return [] if self._failed else [record(n, self._log.tensors) for n in range(begin, end)]

    def close(self) -> None:
        self._log.closed += 1


@contextmanager
def requesting(
    monkeypatch: pytest.MonkeyPatch, versions: int, timeout_s: float = 300.0
) -> Iterator[tuple[Log, RequestedVersions]]:
    log = Log()
    log.versions = versions
    monkeypatch.setattr(requested_versions, "TopicFollower", lambda _kafka, _start: Follower(log))
    monkeypatch.setattr(requested_versions, "load_version", log.load_version)
    nobody = KafkaConfig(bootstrap_servers="127.0.0.1:1")
    with RequestedVersions(nobody, "main", fetch_timeout_s=timeout_s) as requested:
        yield log, requested
    assert log.opened == log.closed


def await_held(requested: RequestedVersions, version: int) -> None:
    """Request a version, again after each failure, as serve-weights does."""

    def held() -> bool:
        if requested.status().error:
            requested.request(version)
        return requested.status().held == version

    requested.request(version)
    eventually(held, 60, f"version {version} is held")


def await_error(requested: RequestedVersions, version: int) -> str:
    requested.request(version)
    return eventually(lambda: requested.status().error, 60, "an error")


def test_a_version_before_one_that_was_fetched_can_still_be_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    with requesting(monkeypatch, 40, timeout_s=0.05) as (log, requested):
        for version in (35, 12, 35):
            await_held(requested, version)
            assert log.opened == log.closed + 1


def test_the_version_before_a_damaged_full_version_is_held_at_its_first_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with requesting(monkeypatch, 31) as (log, requested):
        log.damaged.add(30)
        assert await_error(requested, 30) == "version 30 is damaged"
        requested.request(29)
        eventually(lambda: requested.status().held == 29, 60, "version 29 is held, without a second request")
        assert requested.status().error == ""


def test_a_topic_that_takes_longer_to_read_than_a_request_may_take_is_read_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with requesting(monkeypatch, 100, timeout_s=0.0) as (log, requested):
        await_held(requested, 95)
        assert log.opened == 1


def test_a_reader_of_manifests_that_failed_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with requesting(monkeypatch, 1) as (log, requested):
        log.failing = True
        assert await_error(requested, 0) == "the position is no longer in the log"
        await_held(requested, 0)


def test_an_error_says_whether_another_attempt_may_help(monkeypatch: pytest.MonkeyPatch) -> None:
    with requesting(monkeypatch, 3) as (log, requested):
        log.unloadable.add(1)
        log.damaged.add(2)
        assert (await_error(requested, 1), requested.status().final) == ("version 1 is late", False)
        assert (await_error(requested, 2), requested.status().final) == ("version 2 is damaged", True)


def test_a_mistake_of_ours_is_logged_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def mistaken(*_: Any, **__: Any) -> None:
        raise NameError("name 'manifest' is not defined")

    with requesting(monkeypatch, 1) as (_log, requested):
        monkeypatch.setattr(requested_versions, "load_version", mistaken)
        assert await_error(requested, 0) == "NameError: name 'manifest' is not defined"
    assert ", in mistaken" in log_lines(caplog)


def test_a_version_with_adapters_is_refused_before_it_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    with requesting(monkeypatch, 1) as (log, requested):
        log.tensors = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.lora_A.weight"
        requested.request(0)
        status = eventually(lambda: s if (s := requested.status()).error or s.held == 0 else None, 60, "an answer")
        assert ("policy version 0 has adapters" in status.error, status.final) == (True, True)
        assert log.most_known == 0, "nothing is fetched"


def test_manifests_that_no_requested_version_builds_on_are_not_kept_even_if_no_fetch_succeeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with requesting(monkeypatch, 0) as (log, requested):
        for version in (495, 500, 505):
            log.versions = version + 1
            log.unloadable.add(version)
            assert await_error(requested, version) == f"version {version} is late"
        assert log.most_known <= 2 * FULL_EVERY
