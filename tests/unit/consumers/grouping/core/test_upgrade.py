"""State and logs of earlier core versions are continued, refolded bit for bit, or refused with the remedy."""

import json
from dataclasses import replace
from typing import Any

import pytest

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core import task_state
from rollstream.consumers.grouping.core.configuration_marks import CORE_STEP, SINCE, check_names
from rollstream.consumers.grouping.core.effects import CORE_VERSION, Effects, InputRecord
from rollstream.consumers.grouping.core.estimators import ESTIMATORS, Estimator
from rollstream.consumers.grouping.core.fold import Fold
from rollstream.consumers.grouping.core.plug_ins import PlugIns
from rollstream.consumers.grouping.makers.batch_maker import FifoBatchMaker
from rollstream.consumers.grouping.makers.registry import MAKERS
from rollstream.consumers.grouping.testing import GroupingTestDriver
from rollstream.topics import codec
from rollstream.topics.errors import ConfigurationError, StateRefused
from rollstream.topics.keys import encode_key
from rollstream.topics.offset_ranges import from_ranges
from rollstream.topics.records import JournalRecord, Mark, TrainingBatch, same
from tests.support import upgrade
from tests.support.pairs import pair, reasons
from tests.support.upgrade import Recorded

VERSIONS = tuple(range(1, CORE_VERSION))
"""Core versions before today's; each left a fixture."""


def test_every_estimator_and_maker_has_the_core_version_that_brought_it() -> None:
    assert SINCE.keys() == {*ESTIMATORS, *MAKERS}
    assert max(SINCE.values()) <= CORE_VERSION


@pytest.fixture(scope="module", params=VERSIONS)
def recorded(request: pytest.FixtureRequest) -> Recorded:
    return upgrade.load(request.param)


def restored(journal: list[JournalRecord], log: list[InputRecord]) -> Fold:
    """Return the fold that today's code restores from a journal and the log."""
    reached = task_state.restored_state(journal)
    fold = Fold(reached)
    for record in log[reached.watermark : reached.position]:
        fold.replay(record)
    fold.resume()
    return fold


def agree(ours: list[TrainingBatch], theirs: list[TrainingBatch]) -> bool:
    return len(ours) == len(theirs) and all(same(a, b) for a, b in zip(ours, theirs, strict=True))


def finished(journal: JournalRecord) -> list[int]:
    return [offset for fate in journal.finished for offset in from_ranges(fate.runs)]


def go_on(recorded: Recorded) -> tuple[Fold, Effects]:
    fold = restored(recorded.journal_records(), recorded.log)
    for record in recorded.log[recorded.position :]:
        fold.apply(record)
    return fold, fold.prepare_commit()


def test_the_fixture_covers_the_cases_of_an_upgrade(recorded: Recorded) -> None:
    journal = recorded.journal_records()
    reached = task_state.restored_state(journal)
    assert {record.core_version for record in journal} == {recorded.core_version}
    assert not journal[-1].snapshot, "deltas follow the snapshot"
    assert reached.watermark < reached.position < len(recorded.log)
    assert journal[-1].watermark_generation < journal[-1].generation, "a configuration mark lies between"
    assert len(recorded.committed()) < len(recorded.batches)
    assert {drop.reason for drop in recorded.drops} >= {"late", "cancelled", "stale_version", "group_too_small"}
    fold = restored(journal, recorded.log)
    assert fold.open_groups > 0
    assert fold.in_flight > fold.open_groups


def test_todays_code_continues_from_earlier_state_and_loses_and_repeats_nothing(recorded: Recorded) -> None:
    fold, output = go_on(recorded)
    committed = recorded.committed()
    assert agree([*committed, *output.batches], recorded.batches)
    written = [drop for record in recorded.journal_records() for drop in record.drops]
    assert [*written, *output.journal.drops] == recorded.drops
    before = [offset for record in recorded.journal_records() for offset in finished(record)]
    ended = [*before, *finished(output.journal)]
    assert len(ended) == len(set(ended))
    assert len(ended) + fold.in_flight == len(recorded.log)


def test_todays_code_folds_an_earlier_log_bit_for_bit(recorded: Recorded) -> None:
    fold = Fold(task_state.restored_state(recorded.journal_records()[:1]))
    for record in recorded.log:
        fold.apply(record)
    output = fold.prepare_commit()
    assert agree(list(output.batches), recorded.batches)
    assert list(output.journal.drops) == recorded.drops
    assert [letter.record.offset for letter in output.dead_letters] == recorded.dead_letters
    assert {batch.core_version for batch in output.batches} == {recorded.core_version}


# ---------------------------------------------------------------------- a higher version by a mark


def raised(fold: Fold, offset: int, **settings: Any) -> InputRecord:
    """A mark that puts today's core version in force."""
    config = replace(fold.config, generation=fold.config.generation + 1, core_version=CORE_VERSION, **settings)
    mark = Mark(kind="configuration", generation=config.generation, configuration=config.to_json())
    return InputRecord(offset, fold.stream_time_ms, encode_key("mark", mark.kind), codec.encode(mark))


def test_a_state_of_core_version_1_keeps_it_until_a_higher_generation_raises_it() -> None:
    recorded = upgrade.load(1)
    fold = restored(recorded.journal_records(), recorded.log)
    assert fold.config.core_version == 1
    fold.apply(raised(fold, fold.position))
    assert fold.config.core_version == CORE_VERSION
    for record in recorded.log[recorded.position :]:
        fold.apply(record._replace(offset=record.offset + 1))
    ours = {uid: batch for batch in fold.prepare_commit().batches for uid in batch.uids}
    theirs = {uid: batch for batch in recorded.batches for uid in batch.uids}
    assert {batch.core_version for batch in ours.values()} == {CORE_VERSION}
    uid = "branched-after-g0"
    # Episodes have rewards 1 and 0.5; by branches they were 1, 0, 1, 1.
    assert advantage(ours[uid], uid) == pytest.approx(1.0, rel=1e-6)
    assert advantage(theirs[uid], uid) == pytest.approx(0.7698, rel=1e-4)


def advantage(batch: TrainingBatch, uid: str) -> float:
    return float(batch.advantages[batch.splits[batch.uids.index(uid)]])


@pytest.mark.parametrize(("core_version", "superseded"), [(1, []), (2, [0, 1])])
def test_version_2_drops_groups_that_sealed_before_superseding_was_on(core_version: int, superseded: list[int]) -> None:
    driver = GroupingTestDriver(GroupingConfig(batch_rollouts=100, core_version=core_version), policy_version=2)
    pair(driver, policy_version=1)
    pair(driver, policy_version=2)
    driver.configure(GroupingConfig(batch_rollouts=100, core_version=core_version, drop_superseded=True))
    assert sorted(reasons(driver)) == superseded


# ---------------------------------------------------------------------- state of newer code


def tomorrow(core_version: int, **keys: Any) -> str:
    """A configuration of generation 1 as code of that core version may write it."""
    return json.dumps({**json.loads(GroupingConfig(generation=1).to_json()), "core_version": core_version, **keys})


NEWER = [
    tomorrow(CORE_VERSION + 1),
    tomorrow(CORE_VERSION + CORE_STEP),
    tomorrow(CORE_VERSION + 1, a_key_of_tomorrow=1),
]


@pytest.mark.parametrize("text", NEWER)
def test_a_configuration_mark_of_newer_code_stops_the_task_and_names_the_remedy(text: str) -> None:
    driver = GroupingTestDriver()
    with pytest.raises(StateRefused, match="does not know: upgrade rollstream"):
        driver.pipe(Mark(kind="configuration", generation=1, configuration=text))


@pytest.mark.parametrize("text", NEWER)
def test_a_configuration_mark_of_newer_code_that_is_not_higher_is_ignored(text: str) -> None:
    driver = GroupingTestDriver(GroupingConfig(generation=1))
    driver.pipe(Mark(kind="configuration", generation=1, configuration=text))
    assert driver.fold.config == GroupingConfig(generation=1)


@pytest.mark.parametrize("text", [tomorrow(CORE_VERSION + CORE_STEP + 1), tomorrow(99), tomorrow(3, no_such_key=1)])
def test_a_configuration_mark_that_no_release_can_obey_is_an_invalid_record(text: str) -> None:
    driver = GroupingTestDriver()
    driver.pipe(Mark(kind="configuration", generation=1, configuration=text))
    pair(driver)
    assert driver.fold.config == GroupingConfig()
    assert reasons(driver) == {0: "invalid"}
    driver.crash_and_restore()
    assert driver.fold.config == GroupingConfig()


def test_a_key_is_invalid_under_versions_before_its_own() -> None:
    config = GroupingConfig(core_version=2, max_reward=1.0)
    assert "max_reward" not in config.to_json()
    with pytest.raises(ConfigurationError, match="came with core version 3"):
        check_names(config)
    with pytest.raises(ConfigurationError, match="came with core version 3"):
        GroupingConfig.from_json('{"core_version": 2, "max_reward": 1.0}')


@pytest.mark.parametrize("text", [tomorrow(CORE_VERSION + 1), tomorrow(CORE_VERSION, a_key_of_tomorrow=1)])
def test_a_state_under_a_configuration_of_newer_code_is_refused_with_the_remedy(text: str) -> None:
    first = task_state.initial_record(0, 1, "test", GroupingConfig())
    with pytest.raises(StateRefused, match="does not know: upgrade rollstream"):
        Fold(task_state.restored_state([replace(first, watermark_configuration=text)]))


def test_later_names_are_invalid_under_an_earlier_core_version() -> None:
    for settings in ({"estimator": "opo"}, {"estimator": "reinforce_pp"}, {"maker": "reservoir"}, {"maker": "my:Own"}):
        config = GroupingConfig(core_version=1, **settings)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="came with core version 2"):
            check_names(config, PlugIns(makers={**MAKERS, "my:Own": FifoBatchMaker}))
        driver = GroupingTestDriver(makers={"my:Own": FifoBatchMaker})
        driver.configure(config)
        assert driver.fold.config.generation == 0


def test_a_users_estimator_and_names_of_version_6_are_invalid_under_version_5() -> None:
    own = {"my:own": Estimator(lambda outcomes: list(outcomes.rewards))}
    for settings in ({"estimator": "reinforce_pp_global"}, {"estimator": "my:own"}, {"keep_zero_variance": True}):
        config = GroupingConfig(core_version=5, **settings)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="came with core version 6"):
            check_names(config, PlugIns(estimators={**ESTIMATORS, **own}))
        for known in (own, {}) if "estimator" in settings else ():
            driver = GroupingTestDriver(GroupingConfig(core_version=5), estimators=known)
            driver.configure(config)
            assert driver.fold.config.generation == 0


def test_a_core_version_this_release_does_not_know_cannot_be_configured() -> None:
    with pytest.raises(ConfigurationError, match="knows versions up to"):
        GroupingConfig(core_version=CORE_VERSION + 1)
