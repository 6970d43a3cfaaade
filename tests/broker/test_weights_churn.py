"""Weights under churn on a real broker: publishers die at any chunk, compaction runs, followers join and leave."""

import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest

from rollstream.consumers.weights.follower import State, WeightsFollower
from rollstream.consumers.weights.manifests import read_manifests
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.wire.keys import encode_key
from tests.support.paths import ROOT
from tests.support.runs import RealRun
from tests.support.topic_settings import change_settings
from tests.support.waiting import eventually
from tests.support.weights_child import params_of

SEED = 20


def publisher(run: RealRun, last: int, moment: str = "") -> subprocess.Popen[str]:
    """Start a publisher up to version `last`, which dies at a moment of tests/support/weights_child.py."""
    words = [run.kafka.bootstrap_servers, run.name, str(last), moment]
    command = [sys.executable, "-m", "tests.support.weights_child", *words]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE)


def published(run: RealRun, last: int, moment: str = "") -> int:
    """Run a publisher to its end and return its exit status."""
    with publisher(run, last, moment) as child:
        child.communicate(timeout=1200)
    return child.returncode


class Watcher:
    """Follows a run in a thread until it is stopped, and notes each version that it was given and what was wrong."""

    def __init__(self, run: RealRun, expected: dict[int, dict[str, np.ndarray]]) -> None:
        self._run, self._expected = run, expected
        self._leave = threading.Event()
        self.versions: list[int] = []
        self.faults: list[str] = []
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def leave(self) -> None:
        self._leave.set()
        self._thread.join()

    def _watch(self) -> None:
        try:
            with WeightsFollower(self._run.kafka, self._run.name) as follower:
                while not self._leave.wait(0.01):
                    state = follower.get_state(self.versions[-1] if self.versions else -1)
                    if state is not None:
                        self._note(state)
        except Exception as error:  # the test's thread reads it
            self.faults.append(repr(error))

    def _note(self, state: State) -> None:
        version, arrays = state
        if self.versions and version <= self.versions[-1]:
            self.faults.append(f"version {version} came after {self.versions[-1]}")
        self.versions.append(version)
        expected = self._expected[version]
        if arrays.keys() != expected.keys() or any((arrays[name] != expected[name]).any() for name in expected):
            self.faults.append(f"version {version} is not what was published under that number")


@contextmanager
def watching(run: RealRun, expected: dict[int, dict[str, np.ndarray]]) -> Iterator[Watcher]:
    watcher = Watcher(run, expected)
    try:
        yield watcher
    finally:
        watcher.leave()
    assert watcher.faults == []


def up_to(last: int) -> dict[int, dict[str, np.ndarray]]:
    return {version: params_of(version) for version in range(last + 1)}


def moments_of_death(run: RealRun) -> list[str]:
    """Each number of chunks of a full version and of the delta after it, and the moment before a commit."""
    longest = max(len(manifest.chunks) for manifest in read_manifests(run.kafka, run.name).values())
    return [*map(str, range(1, longest + 4)), "commit"]


def die_at(run: RealRun, moments: list[str]) -> None:
    """For each moment a publisher dies on its way to two versions; followers get every committed version whole."""
    last = max(read_manifests(run.kafka, run.name))
    with watching(run, up_to(last + 2 * len(moments))) as follower:
        for moment in moments:
            assert published(run, last + 2, moment) == -9, f"it was to die at {moment}"
            committed = max(read_manifests(run.kafka, run.name))
            assert committed <= last + 1, "the second version was not committed"
            assert published(run, committed + 1) == 0
            last = committed + 1
        eventually(lambda: follower.versions[-1:] == [last], 120, f"version {last} is followed")
    assert published(run, last) == 0, "a publisher that has nothing to publish removes what the last one left"
    named = {
        encode_key(manifest.version, manifest.epoch, chunk.index)
        for manifest in read_manifests(run.kafka, run.name).values()
        for chunk in manifest.chunks
    }
    live: dict[bytes | None, bool] = {}
    for record in read_to_end(run.kafka, run.topic("weights"), isolation="read_uncommitted"):
        live[record.key] = record.value is not None
    assert {key for key, there in live.items() if there} <= named, "chunks that no manifest names are gone"


def test_a_publisher_killed_amid_its_chunks_or_before_its_manifest_leaves_nothing_torn(run: RealRun) -> None:
    assert published(run, 0) == 0
    die_at(run, ["13", "commit"])


@pytest.mark.long
def test_a_publisher_killed_between_any_two_chunks_leaves_nothing_torn(run: RealRun) -> None:
    assert published(run, 1) == 0
    die_at(run, moments_of_death(run))


def all_at(watchers: list[Watcher], version: int) -> bool:
    return all(watcher.versions[-1:] == [version] for watcher in watchers)


def churn(run: RealRun, versions: int, followers: int) -> None:
    """Publish while the log is compacted as fast as a broker can and followers join and leave at random."""
    change_settings(
        run.kafka,
        run.topic("weights"),
        segment__ms=100,
        segment__bytes=1 << 20,
        min__cleanable__dirty__ratio=0.01,
        min__compaction__lag__ms=0,
        max__compaction__lag__ms=100,
        delete__retention__ms=0,
    )
    expected = up_to(versions - 1)
    chance = random.Random(SEED)
    print(f"seed {SEED}")
    here = [Watcher(run, expected) for _ in range(followers)]
    visits = [*here]
    try:
        # On a busy machine a publisher may be through before a follower has read once, so it stops on its way.
        for last in (versions // 3, 2 * versions // 3, versions - 1):
            with publisher(run, last) as child:
                assert child.stdout is not None
                for _version in child.stdout:
                    if chance.random() < 0.5:
                        place = chance.randrange(1, followers)  # the first one stays from beginning to end
                        here[place].leave()
                        here[place] = Watcher(run, expected)
                        visits.append(here[place])
            assert child.returncode == 0
            eventually(partial(all_at, here, last), 300, f"everybody is at version {last}")
    finally:
        for watcher in visits:
            watcher.leave()
    assert [fault for watcher in visits for fault in watcher.faults] == []
    assert {manifest.kind for manifest in read_manifests(run.kafka, run.name).values()} == {"full", "delta"}


@pytest.mark.long
def test_ten_followers_come_and_go_over_a_hundred_versions_while_the_log_is_compacted(run: RealRun) -> None:
    churn(run, 100, 10)
    topic = run.topic("weights")
    sent = sum(end for _begin, end in topic_admin.bounds(run.kafka, topic).values())
    kept = sum(1 for _ in read_to_end(run.kafka, topic, isolation="read_uncommitted"))
    assert kept < sent / 2, f"the log was compacted: {kept} of {sent} records are left"
