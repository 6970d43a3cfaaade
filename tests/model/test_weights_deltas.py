"""Deltas on a real broker: followers that stay fetch the changes, those that join begin at a full version."""

import numpy as np

from rollstream.consumers.weights.chains import load_version
from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.fetcher import ChunkFetcher
from rollstream.consumers.weights.follower import WeightsFollower
from rollstream.consumers.weights.manifests import read_manifests
from rollstream.consumers.weights.publisher import WeightsPublisher
from rollstream.consumers.weights.state_manager import StateManager
from rollstream.consumers.weights.step_log import StepLog
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.records import PolicyManifest
from rollstream.topics.wire.keys import decode_key
from rollstream.topics.wire.params_digest import params_digest
from tests.support.runs import RealRun

CONFIG = WeightsConfig(chunk_bytes=1000, keep_versions=2, anchor_every=4)


def params(version: int) -> dict[str, np.ndarray]:
    """Each version changes one row of a tensor for good, and its number elsewhere; a NaN comes at version 2."""
    random = np.random.default_rng(0)
    table = random.standard_normal((40, 50)).astype("<f4")
    for row in range(version):
        table[row] += 1.0
    if version >= 2:
        table[39, 0] = np.nan
    return {"table": table, "version": np.int64(version)[None], "still": random.standard_normal(30).astype("<f4")}


def publisher(run: RealRun) -> WeightsPublisher:
    return WeightsPublisher(run.kafka, run.name, "default", "{}", CONFIG)


def publish(source: WeightsPublisher, log: StepLog, step: int) -> PolicyManifest:
    manifest = source.stage(step, params(step))
    log.commit([source.record(manifest)])
    source.committed(manifest)
    return manifest


def kept(run: RealRun) -> set[int]:
    """Versions with a chunk on `weights` whose last record is not a tombstone."""
    last = {m.key: m.value for m in read_to_end(run.kafka, run.topic("weights"), isolation="read_uncommitted")}
    return {int(decode_key(key)[0]) for key, value in last.items() if value is not None}


def test_deltas_lead_from_full_versions_to_every_version_and_are_kept_as_long_as_one_needs_them(
    run: RealRun, log: StepLog
) -> None:
    source = publisher(run)
    publish(source, log, 0)
    with WeightsFollower(run.kafka, run.name) as stays:
        for step in range(7):
            if step:
                publish(source, log, step)
            version, held = stays.wait_for(step, 300)
            assert (version, params_digest(held)) == (step, params_digest(params(step)))
        source.close()
        manifests = read_manifests(run.kafka, run.name)
        assert "".join(manifests[v].kind[0] for v in sorted(manifests)) == "fdddfdd"
        assert [manifests[v].base for v in range(7)] == [-1, 0, 1, 2, -1, 4, 5]
        sizes = {v: sum(chunk.content_bytes for chunk in m.chunks) for v, m in manifests.items()}
        assert max(sizes[v] for v in (1, 2, 3, 5, 6)) < sizes[0] / 10
        assert sum(chunk.size_bytes for chunk in manifests[1].chunks) < sizes[1], "and compressed"
        assert kept(run) == {4, 5, 6}, "5 and 6 are kept and need 4; nothing needs an older one"
        with WeightsFollower(run.kafka, run.name) as joins:
            assert params_digest(joins.wait_for(6, 300)[1]) == params_digest(params(6))

        restarted = publisher(run)
        assert publish(restarted, log, 7).kind == "full", "each publisher begins in full"
        assert publish(restarted, log, 8).kind == "delta"
        restarted.close()
        assert params_digest(stays.wait_for(8, 300)[1]) == params_digest(params(8))
        assert kept(run) == {7, 8}
    fetcher = ChunkFetcher(run.kafka, run.name)
    actual = load_version(fetcher, {8: read_manifests(run.kafka, run.name)[8]}, 8, held=(7, params(7)))
    fetcher.close()
    assert params_digest(actual) == params_digest(params(8)), "nothing but the delta was fetched"


def test_chunks_that_the_newest_versions_build_on_outlive_a_restart(run: RealRun, log: StepLog) -> None:
    source = publisher(run)
    for step in range(4):
        publish(source, log, step)
    source.close()
    publisher(run).close()
    assert kept(run) == {0, 1, 2, 3}
    with WeightsFollower(run.kafka, run.name) as joins:
        assert params_digest(joins.wait_for(3, 300)[1]) == params_digest(params(3))


def test_a_version_without_a_change_is_one_and_what_a_trainer_changes_in_place_is_published(run: RealRun) -> None:
    weights = {"w": np.random.default_rng(0).standard_normal(500)}
    with StateManager(run.kafka, run.name, config=CONFIG) as states:
        for change in (0.0, 0.0, 1.0):
            weights["w"][7] += change
            version = states.update_state(weights)
            actual, held = states.wait_for(version, 300)
            assert (actual, held["w"].tolist()) == (version, weights["w"].tolist())
    manifests = read_manifests(run.kafka, run.name)
    assert [(m.kind, [t.changed for t in m.tensors]) for m in manifests.values()] == [
        ("full", [-1]),
        ("delta", [0]),
        ("delta", [1]),
    ]
