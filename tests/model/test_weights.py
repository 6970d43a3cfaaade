"""Weights on a real broker: a follower holds one whole version or the one before, whoever dies, whenever it joins."""

import dataclasses
import threading

import numpy as np
import pytest
from confluent_kafka import OFFSET_END, TopicPartition

from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.content import ChunksGone, compress
from rollstream.consumers.weights.fetcher import ChunkFetcher
from rollstream.consumers.weights.follower import WeightsFollower
from rollstream.consumers.weights.layout import full_content, split
from rollstream.consumers.weights.publisher import WeightsPublisher
from rollstream.consumers.weights.step_log import StepLog
from rollstream.topics.errors import (
    ConfigurationError,
    DeadlineExceeded,
    DeliveryError,
    Fenced,
    StateRefused,
    TopicError,
)
from rollstream.topics.kafka import clients, provisioning, topic_admin
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.records import PolicyManifest
from rollstream.topics.wire.keys import decode_key, encode_key
from rollstream.topics.wire.params_digest import params_digest, tensor_digests
from tests.support.one_by_one import poll_one_by_one
from tests.support.runs import RealRun
from tests.support.topic_settings import change_settings
from tests.support.untold_offsets import tell_no_offsets
from tests.support.versions import visible_manifests
from tests.support.waiting import eventually

# Small chunks over two partitions: a version is a dozen records.
SMALL = WeightsConfig(chunk_bytes=1000, keep_versions=2)


def arrays(version: int) -> dict[str, np.ndarray]:
    """Every value tells its version, so a mixture would show even without digests."""
    return {f"layer.{i}": np.full((10, 60), version, "<f4") for i in range(5)}


def publisher(run: RealRun, config: WeightsConfig = SMALL) -> WeightsPublisher:
    return WeightsPublisher(run.kafka, run.name, "default", "{}", config)


def publish(source: WeightsPublisher, log: StepLog, step: int) -> PolicyManifest:
    manifest = source.stage(step, arrays(step))
    log.commit([source.record(manifest)])
    source.committed(manifest)
    return manifest


def delete_all_chunks(run: RealRun) -> None:
    """Delete the records of `weights`, which the broker allows on topics that are not compacted only."""
    topic, client = run.topic("weights"), clients.admin(run.kafka)
    change_settings(run.kafka, topic, cleanup__policy="delete")
    for future in client.delete_records([TopicPartition(topic, p, OFFSET_END) for p in (0, 1)]).values():
        future.result(300)


def live_chunks(run: RealRun) -> set[tuple[int, str, int]]:
    """Keys on `weights` whose last record is not a tombstone."""
    last = {m.key: m.value for m in read_to_end(run.kafka, run.topic("weights"))}
    return {decode_key(key) for key, value in last.items() if value is not None}


def test_a_follower_that_joins_late_gets_the_newest_version_at_once(run: RealRun, log: StepLog) -> None:
    source = publisher(run)
    for step in range(5):
        publish(source, log, step)
    visible_manifests(run, 4)
    with WeightsFollower(run.kafka, run.name) as follower:
        version, parameters = follower.wait_for(0, 300)
        assert version == 4
        assert params_digest(parameters) == params_digest(arrays(4))
        assert follower.manifest is not None
        assert follower.manifest.step == 4
        assert follower.get_state(4) is None
        assert follower.get_state(3) is not None


def test_a_follower_whose_manifests_arrive_one_by_one_begins_with_the_newest(
    run: RealRun, log: StepLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = publisher(run, WeightsConfig(chunk_bytes=1000, keep_versions=5))
    for step in range(5):
        publish(source, log, step)
    visible_manifests(run, 4)
    poll_one_by_one(monkeypatch)
    with WeightsFollower(run.kafka, run.name) as follower:
        assert follower.wait_for(0, 300)[0] == 4
        publish(source, log, 5)
        assert follower.wait_for(5, 300)[0] == 5


def test_a_reader_during_publication_never_sees_a_torn_version(run: RealRun, log: StepLog) -> None:
    """Two readers look all the time while twelve versions of a dozen chunks each are published and retired."""
    source = publisher(run)
    torn: list[str] = []
    seen: list[list[int]] = [[], []]
    done = threading.Event()

    def watch(follower: WeightsFollower, versions: list[int]) -> None:
        while not done.is_set():
            state = follower.get_state(versions[-1] if versions else -1)
            if state is not None:
                version, parameters = state
                versions.append(version)
                values = {float(value) for array in parameters.values() for value in np.unique(array)}
                if values != {float(version)} or parameters.keys() != arrays(0).keys():
                    torn.append(f"version {version} held {values}")

    with WeightsFollower(run.kafka, run.name) as one, WeightsFollower(run.kafka, run.name) as other:
        threads = [threading.Thread(target=watch, args=(f, v)) for f, v in zip((one, other), seen, strict=True)]
        for thread in threads:
            thread.start()
        try:
            for step in range(12):
                publish(source, log, step)
            for follower in (one, other):
                assert follower.wait_for(11, 300)[0] == 11
            eventually(lambda: all(versions and versions[-1] == 11 for versions in seen), 60, "both saw version 11")
        finally:
            done.set()
            for thread in threads:
                thread.join()
    assert torn == []
    assert all(versions == sorted(set(versions)) for versions in seen)


@pytest.mark.parametrize("untold", [1, 3])
def test_a_chunk_whose_offset_the_broker_does_not_tell_is_sent_again(
    run: RealRun, log: StepLog, monkeypatch: pytest.MonkeyPatch, untold: int
) -> None:
    tell_no_offsets(monkeypatch, run.topic("weights"), untold)
    manifest = publish(publisher(run), log, 0)
    written = [message.key for message in read_to_end(run.kafka, run.topic("weights"))]
    assert len(written) == len(manifest.chunks) + untold, "each of them once more"
    with WeightsFollower(run.kafka, run.name) as follower:
        assert params_digest(follower.wait_for(0, 300)[1]) == params_digest(arrays(0))


def test_a_broker_that_never_tells_the_offsets_of_chunks_is_one_error(
    run: RealRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = publisher(run)
    tell_no_offsets(monkeypatch, run.topic("weights"))
    with pytest.raises(DeliveryError, match=r"acknowledged \d+ chunks of version 0 without their offsets, 3 times"):
        source.stage(0, arrays(0))


def test_chunks_without_a_manifest_show_nowhere_and_are_tombstoned_at_the_next_start(
    run: RealRun, log: StepLog
) -> None:
    crashed = publisher(run)
    publish(crashed, log, 0)
    lost = crashed.stage(1, arrays(1))
    assert len(live_chunks(run)) == 2 * len(lost.chunks)

    with WeightsFollower(run.kafka, run.name) as follower:
        assert follower.wait_for(0, 300)[0] == 0
        restarted = publisher(run)
        assert {version for version, _, _ in live_chunks(run)} == {0}
        assert restarted.latest_version == 0
        manifest = publish(restarted, log, 1)
        assert (manifest.version, manifest.epoch == lost.epoch) == (1, False)
        assert follower.wait_for(1, 300)[0] == 1


def test_a_manifest_of_an_aborted_transaction_is_never_followed(run: RealRun, log: StepLog) -> None:
    source = publisher(run)
    publish(source, log, 0)
    aborted = source.stage(7, arrays(7))
    producer = clients.transactional_producer(run.kafka, f"other-{run.name}")
    producer.init_transactions(120)
    producer.begin_transaction()
    topic, key, value = source.record(aborted)
    producer.produce(topic, value, key)
    producer.flush(120)
    producer.abort_transaction(120)
    with WeightsFollower(run.kafka, run.name) as follower:
        assert follower.wait_for(0, 300)[0] == 0
        publish(source, log, 1)
        assert follower.wait_for(1, 300)[1]["layer.0"][0, 0] == 1


def test_old_versions_lose_their_chunks_and_keep_their_manifests(run: RealRun, log: StepLog) -> None:
    source = publisher(run)
    for step in range(5):
        publish(source, log, step)
    source.close()
    assert {version for version, _, _ in live_chunks(run)} == {3, 4}
    assert sorted(visible_manifests(run, 4)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("damage", ["gone", "another record"])
def test_a_version_whose_chunks_are_not_there_is_skipped_for_a_newer_one(
    run: RealRun, log: StepLog, damage: str
) -> None:
    source = publisher(run)
    publish(source, log, 0)
    broken = source.stage(1, arrays(1))
    if damage == "gone":
        delete_all_chunks(run)
    else:
        misplaced = dataclasses.replace(broken.chunks[0], offset=broken.chunks[0].offset - 1)
        broken = dataclasses.replace(broken, chunks=(misplaced, *broken.chunks[1:]))
    log.commit([source.record(broken)])
    source.committed(broken)
    fetcher = ChunkFetcher(run.kafka, run.name)
    with pytest.raises(ChunksGone):
        fetcher.fetch(broken, timeout_s=30)
    fetcher.close()
    with WeightsFollower(run.kafka, run.name) as follower:
        publish(source, log, 2)
        assert follower.wait_for(1, 300)[0] == 2


def test_a_version_that_does_not_come_in_time_is_tried_again_until_it_is_held(run: RealRun, log: StepLog) -> None:
    """Its manifest names a chunk at the end of `weights`, as if a broker lagged; the chunk comes later."""
    source = publisher(run)
    publish(source, log, 0)
    early = source.stage(1, arrays(1))
    last = early.chunks[-1]
    _low, end = topic_admin.bounds(run.kafka, run.topic("weights"))[last.partition]
    late = dataclasses.replace(early, chunks=(*early.chunks[:-1], dataclasses.replace(last, offset=end)))
    with WeightsFollower(run.kafka, run.name, config=WeightsConfig(fetch_timeout_s=1.0)) as follower:
        assert follower.wait_for(0, 300)[0] == 0
        log.commit([source.record(late)])
        with pytest.raises(DeadlineExceeded, match="newest: 0"):
            follower.wait_for(1, 2.5)
        content = full_content(arrays(1), tensor_digests(arrays(1)))
        [chunk] = list(split(content.views, SMALL.chunk_bytes))[-1:]
        assert last.codec == "zstd", "constant arrays are worth it"
        run.send_bytes("weights", compress(chunk), encode_key(1, early.epoch, last.index), last.partition)
        version, parameters = follower.wait_for(1, 300)
        assert (version, params_digest(parameters)) == (1, params_digest(arrays(1)))


def test_a_version_whose_weights_are_elsewhere_is_no_error_and_the_next_one_is_followed(
    run: RealRun, log: StepLog, caplog: pytest.LogCaptureFixture
) -> None:
    source = publisher(run)
    elsewhere = dataclasses.replace(source.stage(0, arrays(0)), tensors=(), chunks=(), kind="external")
    log.commit([source.record(elsewhere)])
    source.committed(elsewhere)
    publish(source, log, 1)
    visible_manifests(run, 1)
    with WeightsFollower(run.kafka, run.name) as follower:
        assert follower.wait_for(0, 300)[0] == 1
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_follower_keeps_the_version_it_has_rather_than_one_that_does_not_match(run: RealRun, log: StepLog) -> None:
    source = publisher(run)
    publish(source, log, 0)
    with WeightsFollower(run.kafka, run.name) as follower:
        follower.wait_for(0, 300)
        lying = dataclasses.replace(source.stage(1, arrays(1)), digest="0" * 64)
        log.commit([source.record(lying)])
        source.committed(lying)
        with pytest.raises(DeadlineExceeded, match=r"policy version 1 did not appear .*newest: 0"):
            follower.wait_for(1, 2)
        assert follower.version == 0


def test_a_follower_refuses_to_go_back(run: RealRun, log: StepLog) -> None:
    source = publisher(run)
    old = publish(source, log, 0)
    newer = publish(source, log, 1)
    with WeightsFollower(run.kafka, run.name) as follower:
        follower.wait_for(1, 300)
        log.commit([source.record(old), source.record(newer)])
        publish(source, log, 2)
        assert follower.wait_for(2, 300)[0] == 2
        log.commit([source.record(newer), (run.topic("policies"), encode_key(9), b"no manifest")])
        publish(source, log, 3)
        assert follower.wait_for(3, 300)[0] == 3


def test_a_step_published_with_the_same_digest_is_found_and_one_with_another_digest_is_not(
    run: RealRun, log: StepLog
) -> None:
    first = publisher(run)
    manifest = publish(first, log, 6)
    again = publisher(run)
    assert again.published(6, params_digest(arrays(6))) == manifest
    assert again.published(6, "other") is None
    assert again.published(5, params_digest(arrays(6))) is None
    assert again.stage(6, arrays(60)).version == manifest.version + 1


def test_chunks_larger_than_a_record_are_refused_when_the_publisher_is_built(run: RealRun) -> None:
    with pytest.raises(ConfigurationError, match=r"learner\.weights\.chunk_bytes"):
        publisher(run, WeightsConfig(chunk_bytes=run.kafka.max_record_bytes))


def test_following_a_run_without_topics_is_one_error_at_once(real_run: RealRun) -> None:
    with pytest.raises(TopicError, match="topics apply"):
        WeightsFollower(real_run.kafka, "no-such-run").start()


def test_a_run_has_one_publisher_whatever_learners_are_called(run: RealRun, log: StepLog) -> None:
    first = publisher(run)
    publish(first, log, 0)
    with pytest.raises(StateRefused) as refused:
        StepLog(run.kafka, run.name, "other")
    for part in (
        f"learner 'default' publishes into run {run.name} (newest policy version 0)",
        "learner 'other' is refused",
        f"learner.input_run to {run.name}",
        "learner.take_over",
    ):
        assert part in str(refused.value)
    publish(first, log, 1)  # A learner that is refused fences nobody.

    taken = StepLog(run.kafka, run.name, "other", take_over=True)
    second = WeightsPublisher(run.kafka, run.name, "other", "{}", SMALL)
    with pytest.raises(Fenced, match=f"learner 'default' of run {run.name} was taken over"):
        publish(first, log, 2)
    assert publish(second, taken, 0).version == 2
    taken.close()
    with pytest.raises(StateRefused, match="learner 'other' publishes"):
        StepLog(run.kafka, run.name, "default")
    assert {v: m.learner for v, m in visible_manifests(run, 2).items()} == {
        0: "default",
        1: "default",
        2: "other",
    }


def test_the_number_and_the_chunks_of_a_version_whose_manifest_is_unreadable_stay(run: RealRun, log: StepLog) -> None:
    source = publisher(run)
    for step in range(3):
        publish(source, log, step)
    source.stage(3, arrays(3))
    visible_manifests(run, 2)
    for number in (3, 9, 10**30):
        run.send_bytes("policies", b"of a newer release", encode_key(number))
    chunks = {key for key in live_chunks(run) if key[0] == 3}
    again = publisher(run)
    assert again.latest_version == 3, "no version has the other numbers"
    assert {key for key in live_chunks(run) if key[0] == 3} == chunks != set()
    assert publish(again, log, 4).version == 4
    assert sorted(visible_manifests(run, 4)) == [0, 1, 2, 4]


def test_learners_of_runs_with_similar_names_do_not_meet(run: RealRun) -> None:
    other = dataclasses.replace(run, name=f"{run.name}-lr")
    provisioning.apply(other.kafka, other.topics, other.name)
    one, two = StepLog(run.kafka, run.name, "lr-high"), StepLog(other.kafka, other.name, "high")
    for log, where, learner in ((one, run, "lr-high"), (two, other, "high"), (one, run, "lr-high")):
        publish(WeightsPublisher(where.kafka, where.name, learner, "{}", SMALL), log, 0)
    one.close()
    two.close()
