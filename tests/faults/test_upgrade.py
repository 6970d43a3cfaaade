"""An upgrade on a real broker: today's processes take over what core version 1 left, and lose and repeat nothing."""

import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core.effects import CORE_VERSION
from rollstream.infra.broker import LocalBroker
from rollstream.pipeline.audit.ledger import ledger
from rollstream.topics.config import KafkaConfig, TopicsConfig
from rollstream.topics.records import JournalRecord, TrainingBatch, same
from tests.faults.conftest import SESSION_S
from tests.faults.promises import assert_promises, stop
from tests.faults.upgrading import feed, leave, stamp
from tests.support import upgrade
from tests.support.runs import RealRun, rollout
from tests.support.waiting import eventually

NEW = {"example_id": "new", "group_size": 2, "policy_version": 3, "lowest_version": 3, "highest_version": 3}
KAFKA = {"kafka__session_timeout_s": SESSION_S, "kafka__transaction_timeout_s": 30.0}


@pytest.fixture
def old_run(breakable: LocalBroker, run_name: str, tmp_path: Path) -> Iterator[RealRun]:
    run = RealRun(
        KafkaConfig(bootstrap_servers=breakable.bootstrap_servers), run_name, tmp_path, TopicsConfig(partitions=1)
    )
    yield run
    run.stop()


def await_read(run: RealRun) -> None:
    """Wait until every record is in a place, even if that is in flight."""

    def read() -> bool:
        result = ledger(run.kafka, run.name)
        assert result.problems == []
        return result.produced > 0 and not result.unread

    eventually(read, 60, f"every record of run {run.name} read", every_s=0.3)


def await_raised(run: RealRun, generation: int) -> None:
    def in_force() -> bool:
        journal = [record for record in run.read("journal") if isinstance(record, JournalRecord)]
        return journal[-1].generation == generation

    eventually(in_force, 60, f"generation {generation} in force", every_s=0.2)


def batches_of(run: RealRun) -> list[TrainingBatch]:
    return [batch for batch in run.read("batches") if isinstance(batch, TrainingBatch)]


def test_a_run_of_core_version_1_goes_on_through_upgrade_crash_and_the_raise_of_its_version(old_run: RealRun) -> None:
    run, recorded = old_run, upgrade.load(1)
    leave(run, recorded)
    before = recorded.position
    half_way = (before + len(recorded.log)) // 2

    # New processes cut the same batches as the old ones would have, although one is killed in between.
    upgraded = run.start("group", "--ordinal=0", **KAFKA)
    feed(run, recorded, before, half_way)
    await_read(run)
    upgraded.send_signal(signal.SIGKILL)
    upgraded.wait()
    upgraded = run.start("group", "--ordinal=0", **KAFKA)
    feed(run, recorded, half_way, len(recorded.log))
    await_read(run)
    cut = batches_of(run)
    assert [batch.batch_id for batch in cut] == [batch.batch_id for batch in recorded.batches]
    assert all(same(ours, theirs) for ours, theirs in zip(cut, recorded.batches, strict=True))
    drops = [d for r in run.read("journal") if isinstance(r, JournalRecord) for d in r.drops]
    assert drops == recorded.drops
    stop(upgraded)

    # In a higher generation, episodes are compared.
    stamp(run, "LogAppendTime")
    old = GroupingConfig.from_json(recorded.journal_records()[-1].watermark_configuration)
    generation = recorded.journal_records()[-1].generation + 1
    run.grouping = replace(old, generation=generation, core_version=CORE_VERSION, estimator="rloo", batch_rollouts=4)
    raised = run.start("group", "--ordinal=0", **KAFKA)
    await_raised(run, generation)
    rewards = {"e": (1.0, 0.5), "f": (0.0, 0.25)}
    run.send(
        rollout(f"new-{episode}{branch}", episode_uid=episode, branch=branch, branches=2, reward=reward, **NEW)
        for episode, of_episode in rewards.items()
        for branch, reward in enumerate(of_episode)
    )
    eventually(lambda: len(batches_of(run)) > len(cut), 60, "a batch of the new generation")
    new = batches_of(run)[-1]
    assert (new.core_version, new.generation, len(new)) == (CORE_VERSION, generation, 4)
    assert new.advantages[new.splits[:-1]].tolist() == pytest.approx([0.3125, 0.3125, -0.3125, -0.3125])
    await_read(run)
    stop(raised)
    audited = assert_promises(run, modelled=False)
    assert audited.batches == len(recorded.batches) + 1
