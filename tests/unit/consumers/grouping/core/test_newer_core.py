"""Configurations and state of newer code stop a task with the remedy; what no release can run has no effect."""

import json
from dataclasses import replace
from typing import Any, cast

import pytest

from rollstream.consumers.grouping.config import GrouperConfig, GroupingConfig
from rollstream.consumers.grouping.core import task_state
from rollstream.consumers.grouping.core.configuration_marks import CORE_STEP
from rollstream.consumers.grouping.core.effects import CORE_VERSION
from rollstream.consumers.grouping.core.fold import Fold
from rollstream.consumers.grouping.process.restoration import Restoration
from rollstream.consumers.grouping.testing import GroupingTestDriver
from rollstream.pipeline.audit import refold
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError, StateRefused
from rollstream.topics.kafka.reader import Reader
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import Mark
from tests.support.pairs import pair, reasons


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


@pytest.mark.parametrize(
    "text", [tomorrow(CORE_VERSION + CORE_STEP + 1), tomorrow(99), tomorrow(CORE_VERSION, no_such_key=1)]
)
def test_a_configuration_mark_that_no_release_can_obey_is_an_invalid_record(text: str) -> None:
    driver = GroupingTestDriver()
    driver.pipe(Mark(kind="configuration", generation=1, configuration=text))
    pair(driver)
    assert driver.fold.config == GroupingConfig()
    assert reasons(driver) == {0: "invalid"}
    driver.crash_and_restore()
    assert driver.fold.config == GroupingConfig()


@pytest.mark.parametrize("text", [tomorrow(CORE_VERSION + 1), tomorrow(CORE_VERSION, a_key_of_tomorrow=1)])
def test_a_state_under_a_configuration_of_newer_code_is_refused_with_the_remedy(text: str) -> None:
    first = task_state.initial_record(0, 1, "test", GroupingConfig())
    with pytest.raises(StateRefused, match="does not know: upgrade rollstream"):
        Fold(task_state.restored_state([replace(first, watermark_configuration=text)]))


def test_a_core_version_this_release_does_not_know_cannot_be_configured() -> None:
    with pytest.raises(ConfigurationError, match="knows versions up to"):
        GroupingConfig(core_version=CORE_VERSION + 1)


def test_a_journal_that_a_newer_core_wrote_is_refused_by_name_when_it_is_restored_or_verified(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    newer = replace(task_state.initial_record(0, 1, "id", GroupingConfig()), core_version=CORE_VERSION + 1)
    added = task_state.JournalAccumulator()
    added.add(newer)
    kafka, skipped, no_reader = KafkaConfig(), SkippedRecords(logged=False), cast(Reader, None)
    restoration = Restoration(kafka, "main", 0, 1, "id", GrouperConfig(), skipped, no_reader)
    with pytest.raises(StateRefused, match=f"core version {CORE_VERSION + 1}, but this release has .*; upgrade"):
        restoration.check(added.state(), added)
    monkeypatch.setattr(refold, "read_journal", lambda *_: [(0, newer)])
    with pytest.raises(StateRefused, match=f"run main was cut by core version {CORE_VERSION + 1}.*release that cut"):
        refold.journal_of(kafka, "main", 0, skipped)
