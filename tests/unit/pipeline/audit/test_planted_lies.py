"""One lie for each sentence that ledger, verify and lineage can say, planted in a copy of one recorded run."""

import ast
import json
import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import pytest

from rollstream.consumers.grouping.testing import example_rollout
from rollstream.pipeline.audit.ledger import Ledger, ledger
from rollstream.pipeline.audit.ledger.live import restored, saved
from rollstream.pipeline.audit.ledger.proof import Books
from rollstream.pipeline.audit.verification import verify
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.index.indexed_run import indexed_run
from rollstream.pipeline.tools.lineage import lineage_trees
from rollstream.topics.records import Drop, FinishedOffsets
from rollstream.topics.records.fates import BATCHED
from rollstream.topics.records.journal import to_ranges
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.rl_examples import batch_digest
from tests.simulation.group_coordinator import Committed
from tests.simulation.installation import World, installed
from tests.support.modelled_run import KAFKA, RUN
from tests.support.paths import ROOT
from tests.support.recorded_run import LABELLER, Copy, RecordedRun
from tests.unit.producers.gateway.test_sessions import call

POISON, LAST_BATCH, IN_FLIGHT, END = 13, 15, 19, 20
"""Offsets in rollouts: of the dead letter, of the first row of batch 0-3, of the rollout in flight, and the end."""
CUT_LAST = 14
"""Offset of the journal record that cut batch 0-3, with the dead letter and the drop; the last one is at NEWEST."""
NEWEST = 16
BATCH = 6
"""Offset in batches and in batch-index of batch 0-3."""
Lie = Callable[[RecordedRun], object]


class Planted(NamedTuple):
    """A lie, and all that is said of it."""

    lie: Lie
    ledger: tuple[str, ...] = ()
    """Problems, and what is undecided or unreadable."""
    verify: tuple[str, ...] | None = ()
    """None if the case does not concern it."""
    only: str = ""
    """Batch to verify alone; empty verifies the whole run."""
    lineage: tuple[str, ...] = ()
    """Parts of the tree of `subject`."""
    subject: tuple[str, object] = ("batch", "0-3")


def forged(run: RecordedRun) -> None:
    """Double the advantages of batch 0-3, with digests that agree."""
    batch = run.record("batches", BATCH)
    batch = replace(batch, advantages=batch.advantages * np.float32(2))
    run.change("batches", BATCH, advantages=batch.advantages, digest=batch_digest(batch))
    run.change("batch-index", BATCH, digest=batch_digest(batch))


def finished(run: RecordedRun, fate: str, *offsets: int) -> tuple[FinishedOffsets, ...]:
    """The fates of the journal record that cut batch 0-3, with further offsets."""
    return (*run.record("journal", CUT_LAST).finished, FinishedOffsets(fate=fate, runs=to_ranges(offsets)))


def counted(run: RecordedRun, fate: str, change: int) -> None:
    """Change the journal's last counts of a fate."""
    for offset in (CUT_LAST, NEWEST):
        counts = run.record("journal", offset).counts
        run.change(
            "journal",
            offset,
            counts=tuple(replace(count, rollouts=count.rollouts + change * (count.fate == fate)) for count in counts),
        )


def letter(topic: str, offset: int) -> list[tuple[str, bytes | None]]:
    """Headers of a dead letter."""
    values = {"topic": f"{RUN}.{topic}", "partition": "0", "offset": str(offset)}
    return [(f"__streams.errors.{name}", value.encode()) for name, value in values.items()]


def pruned(run: RecordedRun, offset: int = NEWEST) -> None:
    """Delete the journal before its last record, and what led to it."""
    run.log("journal").begin = offset


def use(run: RecordedRun, offset: int, **fields: object) -> None:
    """Change the only use of a step."""
    [used] = run.record("steps", offset).uses
    run.change("steps", offset, uses=(replace(used, **fields),))


def added(run: RecordedRun) -> None:
    """Add a partition to the rollouts, and write a record there."""
    run.cluster.topics[f"{RUN}.rollouts"].append(deepcopy(run.log("rollouts")))


LIES: dict[str, Planted] = {
    "a partition was added": Planted(
        added,
        ledger=(
            "rollouts[1] was added after the run began, so no process ever reads its offsets 0 to 20; "
            "`rollstream fork` the run into another with more partitions",
        ),
    ),
    # ------------------------------------------------------------ batches
    "a batch is missing": Planted(
        lambda run: run.remove("batches", BATCH),
        ledger=(
            "batch 0-3 is in the journal but not in batches",
            "rollouts[0] offset 15 is batched in the journal but in no batch",
            "batch-index offset 6 names batch 0-3 at batches[0] offset 6; batches does not hold it",
        ),
        verify=("batch 0-3: the fold cuts it, but topic batches lacks it",),
    ),
    "a batch is missing, asked": Planted(
        lambda run: run.remove("batches", BATCH),
        only="0-3",
        verify=("batch 0-3: modelled.batches[0] holds nothing at offset 6",),
    ),
    "a batch is there twice": Planted(
        lambda run: run.repeat("batches", BATCH),
        ledger=(
            "batch 0-3 is in batches twice",
            "rollouts[0] offset 15 is in batches 2 times",
            "batch-index offset 6 names batch 0-3 at batches[0] offset 6; it is at offset 8",
        ),
    ),
    "the journal does not name a batch": Planted(
        lambda run: run.change("journal", CUT_LAST, batch_ids=()),
        ledger=(
            "batch 0-3 is in batches but not in the journal",
            "rollouts[0] offset 15 is batched in the journal but in no batch",
        ),
        verify=(
            "batch 0-3: the index names it, but the journal does not",
            "batch 0-3: the fold cuts it, but topic batches lacks it",
        ),
    ),
    "the journal does not name a batch, asked": Planted(
        lambda run: run.change("journal", CUT_LAST, batch_ids=()),
        only="0-3",
        verify=("batch 0-3: the index names it, but the journal does not",),
    ),
    "a batch names another offset": Planted(
        lambda run: run.change("batches", BATCH, source_offsets=np.array([15, 16, 17, 17], "<i8")),
        ledger=(
            "rollouts[0] offset 18 is batched in the journal but in no batch",
            "rollouts[0] offset 17 is in batches 2 times",
        ),
        verify=(
            "batch 0-3: its content does not match the digest it carries",
            "batch 0-3: source_offsets differ from the refold",
        ),
    ),
    "an offset is in two batches": Planted(
        lambda run: run.change("batches", BATCH, source_offsets=np.array([15, 16, 17, 3], "<i8")),
        ledger=(
            "rollouts[0] offset 18 is batched in the journal but in no batch",
            "rollouts[0] offset 3 is in batches 2 times",
        ),
        verify=(
            "batch 0-3: its content does not match the digest it carries",
            "batch 0-3: source_offsets differ from the refold",
        ),
    ),
    "an evaluation is in a batch": Planted(
        lambda run: run.append("evals", encode(example_rollout("0-0-0", extra={"prompts": "1"}))),
        ledger=("rollout 0-0-0 of evals is in batch 0-0",),
    ),
    "evaluations make no sense": Planted(
        lambda run: (
            run.append("evals", encode(example_rollout("many", extra={"prompts": "many"}))),
            run.append("evals", encode(example_rollout("exact", reward_components={"exact": float("nan")}))),
        ),
        ledger=(
            ("modelled.evals[0] offset 1: rollout many of evals: prompts is 'many', which is not a number of prompts"),
            ("modelled.evals[0] offset 2: rollout exact of evals: reward component exact is nan"),
        ),
    ),
    "a batch is forged": Planted(forged, verify=("batch 0-3: advantages, digest differ from the refold",)),
    "a batch is forged, asked": Planted(
        forged, only="0-3", verify=("batch 0-3: advantages, digest differ from the refold",)
    ),
    "a batch is forged and not in the index": Planted(
        lambda run: (forged(run), run.remove("batch-index", BATCH)),
        ledger=(
            (
                "1 batches have no entry in batch-index, which begins at offset 0, so no learner finds "
                "them; the first is 0-3"
            ),
        ),
        verify=(
            "batch 0-3: the index has digest none",
            "batch 0-3: differs from the refold",
        ),
    ),
    "a batch is changed": Planted(
        lambda run: run.change("batches", BATCH, advantages=run.record("batches", BATCH).advantages * np.float32(2)),
        verify=(
            "batch 0-3: its content does not match the digest it carries",
            "batch 0-3: advantages differ from the refold",
        ),
    ),
    "a batch is no record": Planted(
        lambda run: run.put("batches", BATCH, b"junk"),
        only="0-3",
        verify=(
            (
                "batch 0-3 cannot be read: modelled.batches[0] offset 6: not an Avro single-object frame "
                "(starts with 6a 75 6e 6b); encode records with rollstream.encode"
            ),
        ),
    ),
    "an invented batch": Planted(
        lambda run: (
            run.repeat("batches", BATCH, batch_id="0-4", number=4),
            run.change("journal", NEWEST, batch_ids=("0-4",), batch_number=5),
        ),
        ledger=(
            "rollouts[0] offset 15 is in batches 2 times",
            (
                "1 batches have no entry in batch-index, which begins at offset 0, so no learner finds "
                "them; the first is 0-4"
            ),
        ),
        verify=(
            "batch 0-4: its content does not match the digest it carries",
            "batch 0-4: the index has digest none",
            "batch 0-4: topic batches has it, but the fold does not cut it",
        ),
    ),
    "an invented batch, asked": Planted(
        lambda run: (
            run.repeat("batches", BATCH, batch_id="0-4", number=4),
            run.repeat("batch-index", BATCH, batch_id="0-4", offset=8),
            run.change("journal", NEWEST, batch_ids=("0-4",), batch_number=5),
        ),
        only="0-4",
        verify=(
            "batch 0-4: its content does not match the digest it carries",
            "batch 0-4: topic batches has it, but the fold does not cut it",
        ),
    ),
    # ------------------------------------------------------------ the index
    "an entry is missing": Planted(
        lambda run: run.remove("batch-index", BATCH),
        ledger=(
            (
                "1 batches have no entry in batch-index, which begins at offset 0, so no learner finds "
                "them; the first is 0-3"
            ),
        ),
        verify=("batch 0-3: the index has digest none",),
    ),
    "an entry is there twice": Planted(
        lambda run: run.repeat("batch-index", BATCH),
        ledger=("batch-index offset 8 names batch 0-3, which offset 6 already names",),
    ),
    "entries are in another order": Planted(
        lambda run: (
            run.put("batch-index", 4, entry := run.record("batch-index", BATCH)),
            run.put("batch-index", BATCH, replace(entry, batch_id="0-2", offset=4)),
        ),
        ledger=(
            "batch-index offset 6 names batch 0-2 after batch 0-3",
            "step 3 of learner test names batch 0-2 at index offset 4, which names batch 0-3",
        ),
        verify=(("batch 0-2: the index has digest e4dada60bd1febcde94422797218207c5b02754e954d028e1772a1dc060023cc"),),
    ),
    "an entry of no batch": Planted(
        lambda run: run.repeat("batch-index", BATCH, batch_id="0-9", offset=9),
        ledger=("batch-index offset 8 names batch 0-9, which no journal names",),
        verify=("batch 0-9: the index names it, but the journal does not",),
    ),
    "an entry of no batch, asked": Planted(
        lambda run: run.repeat("batch-index", BATCH, batch_id="0-9", offset=9),
        only="0-9",
        verify=("batch 0-9: the index names it, but the journal does not",),
    ),
    "an entry names another place": Planted(
        lambda run: run.change("batch-index", BATCH, offset=4),
        ledger=("batch-index offset 6 names batch 0-3 at batches[0] offset 4; it is at offset 6",),
    ),
    "an entry has another digest": Planted(
        lambda run: run.change("batch-index", BATCH, digest="ab"), verify=("batch 0-3: the index has digest ab",)
    ),
    # ------------------------------------------------------------ the journal
    "the journal's first record is missing": Planted(
        lambda run: run.remove("journal", 0), ledger=("journal[0] begins with sequence 1, although nothing was pruned",)
    ),
    "a record of the journal is missing": Planted(
        lambda run: run.remove("journal", 6),
        ledger=(
            "journal[0] sequence 4 begins at offset 9; sequence 3 at 5 was expected",
            "journal[0] counts 16 records batched from offset 0 to 20, but names 12",
            "batch 0-1 is in batches but not in the journal",
            "rollouts[0] offset 5 was read but has no fate",
        ),
        verify=(
            "batch 0-1: the index names it, but the journal does not",
            "batch 0-1: the fold cuts it, but topic batches lacks it",
        ),
    ),
    "the journal's last record is missing": Planted(
        lambda run: run.remove("journal", NEWEST),
        ledger=("journal[0] does not hold offset 16, which a commit of group modelled.grouper names",),
    ),
    "the journal has no snapshot": Planted(
        lambda run: (pruned(run), run.change("journal", NEWEST, snapshot=False)),
        ledger=(
            "journal[0] holds no complete snapshot",
            "batch 0-0 is in batches but not in the journal",
            "rollouts[0] offset 13 is dead-lettered in the topic alone",
            "rollouts[0] offset 0 was read but has no fate",
        ),
    ),
    "a record has two fates": Planted(
        lambda run: run.change("journal", CUT_LAST, finished=finished(run, "dropped", 2)),
        ledger=(
            "rollouts[0] offset 2 is batched and then dropped",
            "journal[0] counts 16 records batched from offset 0 to 20, but names 15",
            "journal[0] counts 1 records dropped from offset 0 to 20, but names 2",
            "rollouts[0] offset 2 is batched in a batch but not in the journal",
            "records are dropped without a reason",
        ),
    ),
    "a record got its fate before": Planted(
        lambda run: (pruned(run, 12), run.change("journal", CUT_LAST, finished=finished(run, "dropped", 2))),
        ledger=("rollouts[0] offset 2 is dropped, but got its fate before the journal begins",),
    ),
    "a record has no fate": Planted(
        lambda run: run.change("journal", CUT_LAST, finished=run.record("journal", CUT_LAST).finished[:1]),
        ledger=(
            "journal[0] counts 1 records dead_lettered from offset 0 to 20, but names 0",
            "journal[0] counts 1 records dropped from offset 0 to 20, but names 0",
            "rollouts[0] offset 13 is dead-lettered in the topic alone",
            "rollouts[0] offset 13 was read but has no fate",
        ),
    ),
    "the journal counts too much": Planted(
        lambda run: counted(run, BATCHED, 1),
        ledger=(
            "journal[0] counts 17 records batched from offset 0 to 20, but names 16",
            "by the journal's counts, 0 rollouts have no fate, but 1 are in flight",
        ),
    ),
    "the journal counts too little": Planted(
        lambda run: counted(run, BATCHED, -1),
        ledger=(
            "journal[0] counts 15 records batched from offset 0 to 20, but names 16",
            "by the journal's counts, 2 rollouts have no fate, but 1 are in flight",
        ),
    ),
    "a drop is left out": Planted(
        lambda run: run.change("journal", CUT_LAST, drops=()),
        ledger=("records are dropped without a reason",),
        verify=("rollouts[0] offset 14 is dropped as invalid only in the refold",),
    ),
    "a drop is invented": Planted(
        lambda run: run.change(
            "journal", CUT_LAST, drops=(*run.record("journal", CUT_LAST).drops, Drop(offset=IN_FLIGHT, reason="late"))
        ),
        verify=("rollouts[0] offset 19 is dropped as late only in the journal",),
    ),
    # ------------------------------------------------------------ rollouts
    "a rollout is deleted unread": Planted(
        lambda run: (run.repeat("rollouts", 3), setattr(run.log("rollouts"), "begin", END + 1)),
        ledger=(
            ("rollouts[0] begins at offset 21, and the group has read up to 20: 1 offsets were deleted unread"),
            "rollouts[0] offset 19 is in flight and was deleted",
            "by the journal's counts, 1 rollouts have no fate, but 0 are in flight",
        ),
    ),
    "a rollout in flight is deleted": Planted(
        lambda run: setattr(run.log("rollouts"), "begin", END),
        ledger=(
            "rollouts[0] offset 19 is in flight and was deleted",
            "by the journal's counts, 1 rollouts have no fate, but 0 are in flight",
        ),
    ),
    "the log is cut off": Planted(
        lambda run: run.log("rollouts").entries.pop(),
        ledger=(
            "rollouts[0] ends at offset 19, but was read up to 20",
            "rollouts[0] offset 19 is in_flight but holds no record",
            "by the journal's counts, 1 rollouts have no fate, but 0 are in flight",
        ),
    ),
    "a rollout is removed": Planted(
        lambda run: run.remove("rollouts", 3),
        ledger=("rollouts[0] offset 3 is batched but holds no record",),
        verify=(
            "batch 0-0: cut_ms, groups, source_offsets, uids, digest differ from the refold",
            "batch 0-3: topic batches has it, but the fold does not cut it",
        ),
    ),
    "the log is written again": Planted(
        lambda run: run.change("journal", NEWEST, leader_epoch=7),
        ledger=(
            (
                "rollouts[0] offsets 0 to 19 were read as other records: the log was cut off and written "
                "again (its leader epoch differs), and the records there now were never read"
            ),
        ),
    ),
    # ------------------------------------------------------------ dead letters
    "a dead letter is missing": Planted(
        lambda run: run.remove("dead-letters", 0),
        ledger=("rollouts[0] offset 13 is dead-lettered in the journal alone",),
    ),
    "a dead letter is missing before a prune": Planted(
        lambda run: (pruned(run), run.remove("dead-letters", 0)),
        ledger=("rollouts[0]: 0 records below offset 20 are in dead-letters, but the journal counts 1",),
    ),
    "a dead letter of a batched record": Planted(
        lambda run: run.append("dead-letters", b"", letter("rollouts", 3)),
        ledger=("rollouts[0] offset 3 is dead-lettered in the topic alone",),
    ),
    "a dead letter is there twice": Planted(
        lambda run: run.repeat("dead-letters", 0), ledger=("rollouts[0] offset 13 is dead-lettered 2 times",)
    ),
    # ------------------------------------------------------------ the learner
    "a batch is trained on twice": Planted(
        lambda run: use(run, 4, batch_id="0-0", index_offset=0),
        ledger=(
            "step 3 of learner test uses batch 0-0 a second time",
            ("step 3 of learner test moved past 1 batches that no step names; the first is 0-2 at index offset 4"),
        ),
    ),
    "a skipped batch is trained on": Planted(
        lambda run: use(run, 4, batch_id="0-1", index_offset=2),
        ledger=(
            "step 3 of learner test uses batch 0-1 a second time",
            ("step 3 of learner test moved past 1 batches that no step names; the first is 0-2 at index offset 4"),
        ),
    ),
    "a batch is used again at first": Planted(
        lambda run: use(run, 4, again=True),
        ledger=("step 3 of learner test uses rollouts of batch 0-2 again that it had not trained on",),
    ),
    "a step uses too few rows": Planted(
        lambda run: use(run, 4, rows=3), ledger=("step 3 of learner test used 3 rows of batch 0-2, which has 4",)
    ),
    "a step is beyond the index": Planted(
        lambda run: run.change("steps", 4, position=99),
        ledger=(
            "step 3 of learner test is at index offset 99, but batch-index ends at 8",
            ("step 3 of learner test moved past 1 batches that no step names; the first is 0-3 at index offset 6"),
        ),
    ),
    "a step passes a batch by": Planted(
        lambda run: run.remove("steps", 2),
        ledger=(
            ("step 3 of learner test moved past 1 batches that no step names; the first is 0-1 at index offset 2"),
        ),
    ),
    # ------------------------------------------------------------ sessions
    "a session names no rollout": Planted(
        lambda run: run.change("calls", 2, uids=("0-0-0", "never")),
        ledger=("session g.0 names rollout never, which is not in rollouts",),
    ),
    # ------------------------------------------------------------ labels
    "a label is missing": Planted(
        lambda run: run.remove("trajectories", 0),
        ledger=(
            (
                "unlabelled[0]: 0 records are labeled according to the topics, but 1 according to the "
                "counts committed with the position"
            ),
            (
                "unlabelled[0]: 2 records are left out according to the topics, but 1 according to the "
                "counts committed with the position"
            ),
        ),
    ),
    "a label is there twice": Planted(
        lambda run: run.repeat("trajectories", 0), ledger=("unlabelled[0] offset 0 is labeled 2 times",)
    ),
    "a refusal is there twice": Planted(
        lambda run: run.repeat("dead-letters", 2), ledger=("unlabelled[0] offset 1 is dead-lettered 2 times",)
    ),
    "a record is labeled and refused": Planted(
        lambda run: run.append("dead-letters", b"", letter("unlabelled", 0)),
        ledger=(
            (
                "unlabelled[0]: 2 records are dead lettered according to the topics, but 1 according to "
                "the counts committed with the position"
            ),
            "unlabelled[0] offset 0 is labeled and dead-lettered",
        ),
    ),
    "the position of labels is lost": Planted(
        lambda run: run.cluster.groups[LABELLER].offsets.clear(),
        ledger=(
            (
                "unlabelled[0] was labeled, but no position is committed: commit it again with "
                "`rollstream role label recover`"
            ),
        ),
    ),
    "the position of pruned labels is lost": Planted(
        lambda run: (
            run.cluster.groups[LABELLER].offsets.clear(),
            [log.entries.clear() for log in (run.log("trajectories"), run.log("dead-letters"))],
            run.repeat("unlabelled", 0),
            setattr(run.log("unlabelled"), "begin", 3),
        ),
        ledger=(
            "rollouts[0] offset 13 is dead-lettered in the journal alone",
            (
                "unlabelled[0] begins at offset 3, but no position is committed: commit it again with "
                "`rollstream role label recover`"
            ),
        ),
    ),
    "a trajectory is deleted unlabeled": Planted(
        lambda run: (run.repeat("unlabelled", 0), setattr(run.log("unlabelled"), "begin", 4)),
        ledger=(
            (
                "unlabelled[0] begins at offset 4, and group modelled.labeller has read up to 3: 1 "
                "offsets were deleted unread"
            ),
        ),
    ),
    "a trajectory is deleted unread": Planted(
        lambda run: (run.repeat("trajectories", 0), setattr(run.log("trajectories"), "begin", 2)),
        ledger=(
            ("trajectories[0] begins at offset 2, and filler default has read up to 1: 1 offsets were deleted unread"),
        ),
    ),
    # ------------------------------------------------------------ lineage
    "nothing is a lie": Planted(lambda run: None, subject=("offset", f"0:{POISON}"), lineage=("of an unknown type",)),
    "a batch of a step is missing": Planted(
        lambda run: run.remove("batches", 4),
        subject=("step", 3),
        lineage=("cut from a batch that the log does not hold where the index says",),
    ),
    "a batch of a version is missing": Planted(
        lambda run: run.remove("batches", 4),
        subject=("policy", 0),
        lineage=("not counted a batch that the log does not hold where the index says: batches 0-2",),
    ),
    "a batch has no entry": Planted(
        lambda run: run.remove("batch-index", BATCH),
        subject=("offset", f"0:{LAST_BATCH}"),
        lineage=("fate batched: in a batch that is not in the index (any more)",),
    ),
    "another batch is where the index says": Planted(
        lambda run: run.put("batches", 4, run.record("batches", BATCH)),
        subject=("step", 3),
        lineage=("cut from a batch that the log does not hold where the index says",),
    ),
    "a fate was pruned": Planted(
        pruned, subject=("offset", "0:3"), lineage=("fate settled: in a part of the journal that was pruned",)
    ),
    # ------------------------------------------------------------ open transactions
    "an open transaction hides a batch": Planted(
        verify=None,
        lie=lambda run: [run.hide(name, BATCH) for name in ("batches", "batch-index")],
        ledger=(
            "batch 0-3: a transaction is open on batches[0] from offset 6 to 8",
            ("entry of batch 0-3 in batch-index: a transaction is open on batch-index[0] from offset 6 to 8"),
        ),
    ),
    "an open transaction hides the journal": Planted(
        verify=None,
        lie=lambda run: run.hide("journal", NEWEST),
        ledger=("journal[0] offset 16: a transaction is open on journal[0] from offset 16 to 18",),
    ),
    "an open transaction hides rollouts": Planted(
        verify=None,
        lie=lambda run: (run.repeat("rollouts", 3), run.hide("rollouts", END)),
        ledger=(("records that nobody has read yet: a transaction is open on rollouts[0] from offset 20 to 21"),),
    ),
    "an open transaction hides a dead letter": Planted(
        verify=None,
        lie=lambda run: (run.hide("dead-letters", run.repeat("dead-letters", 0)), run.remove("dead-letters", 0)),
        ledger=(("dead letter of rollouts[0] offset 13: a transaction is open on dead-letters[0] from offset 4 to 5"),),
    ),
    "an open transaction hides a label": Planted(
        verify=None,
        lie=lambda run: run.hide("trajectories", 0),
        ledger=(("label of unlabelled[0] offset 0: a transaction is open on trajectories[0] from offset 0 to 2"),),
    ),
    "an open transaction hides a dead letter of labeling": Planted(
        verify=None,
        lie=lambda run: (run.hide("dead-letters", run.repeat("dead-letters", 2)), run.remove("dead-letters", 2)),
        ledger=(
            ("dead letter of unlabelled[0] offset 1: a transaction is open on dead-letters[0] from offset 4 to 5"),
        ),
    ),
    "an open transaction hides positions of labels": Planted(
        verify=None,
        lie=lambda run: run.cluster.groups[LABELLER].pending.update({77: {(f"{RUN}.unlabelled", 0): Committed(4)}}),
        ledger=(
            ("how far labeling has read unlabelled: a transaction is open on the offsets of group modelled.labeller"),
        ),
    ),
}


SAYS = [ROOT / "pipeline/audit" / name for name in ("verification.py", "partition_journal.py")]
SAYS += [path for path in sorted((ROOT / "pipeline/audit/ledger").glob("*.py")) if path.name != "live.py"]
SAYS.append(ROOT / "pipeline/index/lineage.py")
NO_FINDINGS = {
    "reading offsets of group {}": "names a call in an error",
    "the ledger is incomplete": "names a wait in an error",
    "by {} at {}": "a fact of every batch",
    "of generation {}": "a fact of every batch",
}
"""Texts of these modules that say nothing about a run, each with the reason."""


@pytest.fixture(scope="module")
def recorded() -> tuple[World, RecordedRun, Copy]:
    world = World()
    with installed(world):
        run = RecordedRun(world, call(0))
    return world, run, run.copied()


@pytest.fixture
def world(recorded: tuple[World, RecordedRun, Copy]) -> Iterator[World]:
    world, run, copy = recorded
    run.restored(copy)
    with installed(world):
        yield world


def firsts(texts: Sequence[str]) -> tuple[str, ...]:
    """The first of the texts that differ in numbers only."""
    seen: dict[str, str] = {}
    for text in texts:
        seen.setdefault(re.sub(r"[0-9]+", "#", text), text)
    return tuple(seen.values())


def by_ledger(world: World) -> tuple[str, ...]:
    """All that a ledger says, which goes on from its saved state to say the same."""

    def read() -> list[Ledger]:
        books = Books(KAFKA, RUN)
        whole = books.read()
        return [whole, restored(json.loads(json.dumps(saved(books))), KAFKA).read()]

    book, again = world.result_of(read)
    assert again.as_dict() == book.as_dict()
    assert book.balanced == (not book.problems)
    return firsts([*book.problems, *book.undecided, *book.unreadable])


def by_verify(world: World, only: str) -> tuple[str, ...]:
    return firsts(world.result_of(lambda: verify(KAFKA, RUN, only=[only] if only else None)).mismatches)


def by_lineage(world: World, subject: tuple[str, object]) -> str:
    flags = {**dict.fromkeys(("rollout", "offset", "batch", "step", "policy")), subject[0]: subject[1]}

    def lines() -> list[str]:
        with TemporaryDirectory() as data, indexed_run(RunConfig(run=RUN, kafka=KAFKA, data_dir=Path(data))) as view:
            return [line for tree in lineage_trees(view, Namespace(**flags)) for line in tree.lines()]

    return "\n".join(world.result_of(lines))


def test_nothing_is_said_of_the_run_as_recorded(world: World) -> None:
    book = world.result_of(lambda: ledger(KAFKA, RUN))
    assert (book.problems, book.undecided, book.unreadable, book.balanced) == ([], [], [], True)
    assert (book.batched, book.dropped, book.dead_lettered, book.in_flight) == (16, {"invalid": 1}, 1, 1)
    assert (book.trained, book.skipped, book.evals, book.calls["in_rollouts"]) == (8, 4, 1, 1)
    assert (book.unlabelled["labeled"], book.unlabelled["left_out"], book.unlabelled["dead_lettered"]) == (1, 1, 1)
    whole = world.result_of(lambda: verify(KAFKA, RUN))
    assert (whole.batches, whole.drops, whole.unverifiable, whole.mismatches) == (4, 1, 0, [])
    some = world.result_of(lambda: verify(KAFKA, RUN, only=["0-1", "0-3"]))
    assert (some.batches, some.unverifiable, some.mismatches) == (2, 0, [])


@pytest.mark.parametrize("name", LIES)
def test_a_planted_lie_is_named(world: World, recorded: tuple[World, RecordedRun, Copy], name: str) -> None:
    planted = LIES[name]
    planted.lie(recorded[1])
    if planted.lineage:
        text = by_lineage(world, planted.subject)
        assert all(part in text for part in planted.lineage), text
        return
    if not planted.only:
        assert by_ledger(world) == planted.ledger
    if planted.verify is not None:
        assert by_verify(world, planted.only) == planted.verify


def template(node: ast.AST) -> str | None:
    """A text of a program, with {} for its values."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def sentences(path: Path) -> Iterator[str]:
    """The sentences of a module: texts of three words or more, but no docstrings, errors and descriptions of flags."""
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            continue
        if isinstance(node, ast.keyword) and node.arg in ("help", "example"):
            continue
        if (text := template(node)) is None:
            waiting += ast.iter_child_nodes(node)
        elif len(text.split()) > 2:
            yield text
        if isinstance(node, ast.JoinedStr):
            waiting += [part.value for part in node.values if isinstance(part, ast.FormattedValue)]


@pytest.mark.parametrize("path", SAYS, ids=lambda path: path.stem)
def test_each_sentence_is_said_of_a_planted_lie(path: Path) -> None:
    said = [text for lie in LIES.values() for text in (*lie.ledger, *(lie.verify or ()), *lie.lineage)]
    for sentence in set(sentences(path)) - NO_FINDINGS.keys():
        pattern = ".*".join(map(re.escape, sentence.split("{}")))
        assert any(re.search(pattern, text) for text in said), f"no lie in LIES makes anyone say: {sentence}"
