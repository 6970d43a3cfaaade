"""Manifests read from a long log: only chosen ones stay whole, whatever the order of the log."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.consumers.weights.chains import needed, with_bases
from rollstream.consumers.weights.manifests import Manifests, manifests_in, published_after
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.records import Chunk, PolicyManifest
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from tests.support.manifests import one_chunk_manifest

CHUNK = Chunk(index=0, partition=0, offset=0, size_bytes=1, digest="d")


def record(version: int, *, base: int = -1, learner: str = "l") -> KafkaRecord:
    manifest = one_chunk_manifest(version, CHUNK, base=base, learner=learner)
    return KafkaRecord("policies", 0, 0, key=encode_key(version), value=encode(manifest))


class Log:
    """Messages that count how often they are read, and how many manifests are held whole while they are read."""

    def __init__(self, messages: list[KafkaRecord]) -> None:
        self.messages, self.passes, self.most_whole = messages, 0, 0

    def read(self) -> list[KafkaRecord]:
        self.passes += 1
        return self.messages

    def manifests(self, choice: Callable[[Mapping[int, PolicyManifest]], Collection[int]] | None = None) -> Manifests:
        def watched(known: Mapping[int, PolicyManifest]) -> Collection[int]:
            assert choice is not None
            self.most_whole = max(self.most_whole, len(whole_in(known)))
            return choice(known)

        return manifests_in(self.read, watched if choice else None, logged=False)


def whole_in(manifests: Mapping[int, PolicyManifest]) -> set[int]:
    return {version for version, manifest in manifests.items() if manifest.chunks}


def test_few_manifests_of_a_long_run_are_whole_at_any_time() -> None:
    log = Log([record(version, base=-1 if version % 10 == 0 else version - 1) for version in range(500)])
    by_version = log.manifests(partial(needed, versions=2)).by_version
    assert sorted(by_version) == list(range(500))
    assert whole_in(by_version) == set(range(490, 500))
    assert log.passes == 1
    assert log.most_whole < 40


def test_a_version_needed_late_is_read_again() -> None:
    messages = [record(version) for version in range(100)]
    log = Log([*messages, record(100, base=3)])
    by_version = log.manifests(lambda known: with_bases(known, max(known))).by_version
    assert whole_in(by_version) == {3, 100}
    assert log.passes == 2


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(-1, 29)), max_size=60), st.integers(1, 3))
def test_the_lists_of_needed_versions_are_those_of_their_newest_manifests(
    drawn: list[tuple[int, int]], keep: int
) -> None:
    messages = [record(version, base=base, learner=str(number)) for number, (version, base) in enumerate(drawn)]
    every = Log(messages).manifests().by_version
    chosen = Log(messages).manifests(partial(needed, versions=keep)).by_version
    assert {version: manifest.learner for version, manifest in chosen.items()} == {
        version: manifest.learner for version, manifest in every.items()
    }
    assert whole_in(chosen) == needed(every, keep)


@pytest.mark.parametrize(
    ("versions", "unreadable"), [((0, 1, 3), {2}), ((0, 1), {2}), ((0,), set()), ((1, 2, 3), {2}), ((), set())]
)
def test_versions_whose_manifests_are_unreadable_are_told_by_their_keys(
    versions: tuple[int, ...], unreadable: set[int]
) -> None:
    damaged = KafkaRecord("policies", 0, 0, key=encode_key(2), value=b"not a record")
    foreign = KafkaRecord("policies", 0, 0, key=b"\xff", value=b"not a record")
    manifests = Log([*map(record, (v for v in versions if v != 2)), damaged, foreign]).manifests()
    assert manifests.unreadable == unreadable
    assert manifests.skipped.total == 2


def test_a_step_keeps_the_version_of_its_record_after_a_rollback_to_it() -> None:
    manifests = [replace(one_chunk_manifest(version, CHUNK), params_digest=f"d{version}") for version in (50, 51)]
    rollback = replace(manifests[0], version=56)
    log = [*manifests, rollback]
    assert published_after(log, "default", 50, "d50", 50) == manifests[0]
    assert published_after(log, "default", 50, "d50", 56) == rollback


def test_a_step_without_a_version_on_record_has_the_newest_version_with_its_parameters() -> None:
    first = replace(one_chunk_manifest(3, CHUNK), params_digest="old")
    again = replace(first, version=4, params_digest="new")
    assert published_after([first, again], "default", 3, "new") == again
    assert published_after([first, again], "default", 3, "new", 3) == again
    assert published_after([first, again], "default", 3, "other", 3) is None
    assert published_after([first, again], "other", 3, "new", 4) is None
    assert published_after([first, again], "default", 4, "new", 4) is None
