"""Faults of weights on a real broker: damage is refused by name and place, never held, and healed by the next full
version; a broker that is killed amid a publication costs time only.
"""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from rollstream.consumers.learner.checkpoint_paths import LearnerPosition
from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.records.step_recorder import StepParams, StepRecorder
from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.content import converted
from rollstream.consumers.weights.fetcher import ChunkFetcher
from rollstream.consumers.weights.follower import WeightsFollower
from rollstream.consumers.weights.manifests import read_manifests
from rollstream.consumers.weights.publisher import WeightsPublisher
from rollstream.consumers.weights.rollback import roll_back
from rollstream.consumers.weights.step_log import StepLog
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.index.indexed_run import indexed_run
from rollstream.topics.kafka import topic_admin
from rollstream.topics.logs import JsonFormatter
from rollstream.topics.records import PolicyManifest
from rollstream.topics.wire.keys import encode_key
from rollstream.topics.wire.params_digest import params_digest
from tests.model.test_weights import delete_all_chunks
from tests.support.runs import RealRun
from tests.support.versions import visible_manifests
from tests.support.waiting import eventually
from tests.support.weights_child import params_of

CONFIG = WeightsConfig(chunk_bytes=1000, keep_versions=8, anchor_every=4)
DAMAGED = 1
"""Index of the chunk that is damaged: the middle of `table`."""


def params(version: int) -> dict[str, np.ndarray]:
    """Noise, which is not compressed, and a few rows that each version moves."""
    table = np.random.default_rng(0).standard_normal((40, 50)).astype("<f4")
    table[: 2 * (version % 4)] += 1.0 + version
    return {"table": table, "version": np.int64(version)[None]}


def flipped(data: bytes) -> bytes:
    return data[:500] + bytes([data[500] ^ 1]) + data[501:]


def cut(data: bytes) -> bytes:
    return data[:-1]


def publish(source: WeightsPublisher, log: StepLog, step: int) -> PolicyManifest:
    manifest = source.stage(step, params(step))
    log.commit([source.record(manifest)])
    source.committed(manifest)
    return manifest


def publish_damaged(
    run: RealRun, source: WeightsPublisher, log: StepLog, step: int, damage: Callable[[bytes], bytes], index: int
) -> str:
    """Publish a version one of whose chunks is another record of the same key; return the place of that record."""
    manifest = source.stage(step, params(step))
    fetcher = ChunkFetcher(run.kafka, run.name)
    data = fetcher.fetch(manifest, timeout_s=300)[index]
    fetcher.close()
    chunk = manifest.chunks[index]
    _begin, offset = topic_admin.bounds(run.kafka, run.topic("weights"))[chunk.partition]
    run.send_bytes("weights", damage(data), encode_key(step, manifest.epoch, index), chunk.partition)
    moved = replace(chunk, offset=offset)
    chunks = (*manifest.chunks[:index], moved, *manifest.chunks[index + 1 :])
    log.commit([source.record(replace(manifest, chunks=chunks))])
    # The publisher does not know, so its next version is a delta of this one.
    source.committed(manifest)
    return f"offset {offset} of partition {chunk.partition}"


def reasons(caplog: pytest.LogCaptureFixture, name: str) -> dict[int, str]:
    """Reasons of the logged events of a name, by version."""
    lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records if record.getMessage() == name]
    return {line["version"]: line["reason"] for line in lines}


@pytest.mark.parametrize("damage", [flipped, cut])
def test_a_damaged_full_version_is_refused_by_its_place_and_the_next_version_is_held(
    run: RealRun, log: StepLog, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    caplog.set_level(logging.INFO)
    source = WeightsPublisher(run.kafka, run.name, "default", "{}", replace(CONFIG, anchor_every=1))
    publish(source, log, 0)
    with WeightsFollower(run.kafka, run.name) as follower:
        follower.wait_for(0, 300)
        place = publish_damaged(run, source, log, 1, damage, DAMAGED)
        eventually(lambda: reasons(caplog, "policy_refused"), 120, "the damage is found")
        assert follower.version == 0
        publish(source, log, 2)
        version, held = follower.wait_for(1, 300)
    assert (version, params_digest(held)) == (2, params_digest(params(2)))
    [(refused, reason)] = reasons(caplog, "policy_refused").items()
    assert refused == 1
    assert f"chunk {DAMAGED} " in reason
    assert place in reason
    assert ("tensor table of policy version 1" if damage is flipped else "999 bytes instead of 1000") in reason


def test_what_builds_on_a_damaged_delta_is_skipped_unread_until_the_next_full_version(
    run: RealRun, log: StepLog, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    source = WeightsPublisher(run.kafka, run.name, "default", "{}", CONFIG)
    publish(source, log, 0)
    with WeightsFollower(run.kafka, run.name) as stays:
        stays.wait_for(0, 300)
        place = publish_damaged(run, source, log, 1, lambda data: bytes(len(data)), 0)
        eventually(lambda: 1 in reasons(caplog, "policy_refused"), 120, "the damage is found")
        assert [publish(source, log, step).kind for step in (2, 3)] == ["delta", "delta"]
        eventually(lambda: {2, 3} <= reasons(caplog, "policy_skipped").keys(), 120, "both are skipped")
        assert stays.version == 0
        refused, skipped = reasons(caplog, "policy_refused"), reasons(caplog, "policy_skipped")
        with WeightsFollower(run.kafka, run.name) as joins:
            assert joins.wait_for(0, 300)[0] == 0, "the newest version before the damage"
        assert publish(source, log, 4).kind == "full"
        assert publish(source, log, 5).kind == "delta"
        version, held = stays.wait_for(5, 300)
    assert (version, params_digest(held)) == (5, params_digest(params(5)))
    assert refused.keys() == {1}
    assert place in refused[1]
    assert [reason.rpartition(" builds on ")[0] for _version, reason in sorted(skipped.items())] == [
        "policy version 2",
        "policy version 3",
    ]
    assert all(reason.endswith(", which was refused") for reason in skipped.values())


def after(step: int) -> StepParams:
    arrays = params_of(step)
    return StepParams(params_digest(arrays), arrays)


def lose_a_file(_run: RealRun, manifest: PolicyManifest) -> None:
    Path(manifest.chunks[0].url).unlink()


def lose_the_log(run: RealRun, _manifest: PolicyManifest) -> None:
    delete_all_chunks(run)


@pytest.mark.parametrize(("transport", "lose"), [("files", lose_a_file), ("log", lose_the_log)])
def test_a_learner_that_starts_again_publishes_the_versions_that_nobody_can_fetch_any_more(
    run: RealRun,
    caplog: pytest.LogCaptureFixture,
    transport: Literal["files", "log"],
    lose: Callable[[RealRun, PolicyManifest], None],
) -> None:
    caplog.set_level(logging.INFO)
    url = str(run.directory / "weights") if transport == "files" else ""
    config = LearnerConfig(weights=WeightsConfig(transport=transport, url=url))

    def record(recorder: StepRecorder, step: int) -> int:
        return recorder.record(step, (), 0, {}, after(step), LearnerPosition()).policy_version

    def holds(follower: WeightsFollower, version: int, step: int) -> bool:
        expected = params_digest(converted(params_of(step), "bfloat16"))
        return params_digest(follower.wait_for(version, 300)[1]) == expected

    with StepRecorder(config, run.kafka, run.name, "{}") as recorder:
        assert [record(recorder, step) for step in range(15)] == list(range(15))
    manifests = visible_manifests(run, 14)
    assert "".join(manifests[version].kind[0] for version in range(15)) == "fdddddddddfdddd"
    lose(run, manifests[10])

    with WeightsFollower(run.kafka, run.name) as joins:
        eventually(lambda: set(range(10, 15)) <= reasons(caplog, "policy_skipped").keys(), 120, "all are tried")
        assert joins.version == -1
        # The checkpoint is of step 12, and steps 13 and 14 are executed again.
        with StepRecorder(config, run.kafka, run.name, "{}") as recorder:
            recorder.compare(12, after(12), ())
            assert holds(joins, 15, 12)
            assert [record(recorder, step) for step in (13, 14, 15)] == [16, 17, 18]
            assert holds(joins, 18, 15)
    published = visible_manifests(run, 18)
    assert {version: published[version].step for version in range(15, 19)} == {15: 12, 16: 13, 17: 14, 18: 15}
    assert "".join(published[version].kind[0] for version in range(15, 19)) == "fddd"

    with StepRecorder(config, run.kafka, run.name, "{}") as recorder:
        recorder.compare(14, after(14), ())
        assert record(recorder, 15) == 18
    assert max(read_manifests(run.kafka, run.name)) == 18, "nothing is lost any more"


def test_a_step_that_is_executed_again_after_a_rollback_to_it_keeps_its_version(run: RealRun) -> None:
    def record(recorder: StepRecorder, step: int) -> int:
        return recorder.record(step, (), 0, {}, after(step), LearnerPosition()).policy_version

    with StepRecorder(LearnerConfig(), run.kafka, run.name, "{}") as recorder:
        assert [record(recorder, step) for step in range(3)] == [0, 1, 2]
    visible_manifests(run, 2)
    roll_back(run.kafka, run.name, 1, reason="reward hacking", take_over=True)
    visible_manifests(run, 3)
    with StepRecorder(LearnerConfig(), run.kafka, run.name, "{}") as recorder:
        assert [record(recorder, step) for step in (1, 2, 3)] == [1, 2, 4]
    with indexed_run(RunConfig(run=run.name, kafka=run.kafka, data_dir=run.directory)) as view:
        manifests = [manifest for version in (1, 3, 4) if (manifest := view.policy(version))]
        assert [[step.step for step in view.steps_before(manifest)] for manifest in manifests] == [[1], [1], [3]]
