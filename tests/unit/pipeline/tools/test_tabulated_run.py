"""Answers of a run whose steps are in tables."""

import sqlite3
from dataclasses import replace

from rollstream.pipeline.tools.tabulated_run import TabulatedRun
from rollstream.topics.codec import encode
from rollstream.topics.records import Chunk, LearnerStep
from tests.support.manifests import one_chunk_manifest


def test_a_rollback_comes_from_the_step_of_its_source_and_a_version_from_the_step_that_names_it() -> None:
    db = sqlite3.connect(":memory:")
    db.execute("create table steps (learner text, step integer, version integer, value blob)")
    for learner, number, version in (("default", 4, 2), ("default", 5, 3), ("other", 4, -1)):
        step = LearnerStep(
            learner=learner,
            step=number,
            input_run="main",
            uses=(),
            position=0,
            policy_version=version,
            params_digest="d",
            trained_total=0,
            skipped_total=0,
        )
        db.execute("insert into steps values (?, ?, ?, ?)", (learner, number, version, encode(step)))
    run = TabulatedRun("main", db)
    chunk = Chunk(index=0, partition=0, offset=0, size_bytes=1, digest="")
    published = replace(one_chunk_manifest(2, chunk), step=4)
    rollback = replace(published, version=7)
    for manifest in (published, rollback):
        assert [(step.learner, step.step) for step in run.steps_before(manifest)] == [("default", 4)]
    assert [step.step for step in run.steps_before(one_chunk_manifest(3, chunk, learner="trainer"))] == [5]
