"""The version that a follower tries next: the newest that is due. A version that may still come is not given up."""

from rollstream.consumers.weights.follower import VersionCandidates
from rollstream.topics.records import PolicyManifest


def manifest(version: int) -> PolicyManifest:
    return PolicyManifest(version=version, learner="main", step=version, epoch="", tensors=(), chunks=(), digest="")


def candidates(*versions: int) -> VersionCandidates:
    waiting = VersionCandidates()
    for version in versions:
        waiting.add(manifest(version))
    return waiting


def next_version(waiting: VersionCandidates, now: float) -> int | None:
    due = waiting.next(now)
    return None if due is None else due.version


def test_the_newest_comes_first_and_an_older_one_while_it_is_put_off() -> None:
    waiting = candidates(3, 5, 4)
    assert next_version(waiting, 10.0) == 5
    assert waiting.delay(5, 10.0) == 0.5
    assert next_version(waiting, 10.0) == 4
    waiting.drop_up_to(4)
    assert next_version(waiting, 10.1) is None
    assert next_version(waiting, 10.5) == 5


def test_it_is_tried_again_for_as_long_as_nothing_newer_is_held_ever_more_seldom() -> None:
    waiting, now, delays = candidates(7), 0.0, []
    for _ in range(10):
        delays.append(waiting.delay(7, now))
        assert next_version(waiting, now + 0.9 * delays[-1]) is None
        now += delays[-1]
        assert next_version(waiting, now) == 7
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0]
    waiting.drop_up_to(8)
    assert next_version(waiting, 1e9) is None


def test_what_is_gone_is_never_tried_again_and_only_the_newest_versions_are_remembered() -> None:
    waiting = candidates(*range(20))
    for version in range(19, 11, -1):
        assert next_version(waiting, 0.0) == version
        waiting.drop(version)
    assert next_version(waiting, 0.0) is None
