"""The configurations in journals, by partition, with the changes of each as far as they are known."""

import json
from dataclasses import replace

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core.task_state import initial_record
from rollstream.pipeline.audit.configuration_history import (
    ConfigurationHistory,
    configurations,
    newest_summary,
    summary,
)

FIRST = GroupingConfig(batch_rollouts=8)
SECOND = replace(FIRST, estimator="grpo", generation=2)


def history(*records: tuple[int, int, GroupingConfig]) -> ConfigurationHistory:
    """The history of journal records with these generations, first offsets, and configurations of their watermarks."""
    actual = ConfigurationHistory()
    before = initial_record(0, 1, "test", FIRST)
    for generation, begin, settled in records:
        settings = {"watermark_generation": settled.generation, "watermark_configuration": settled.to_json()}
        actual.read(replace(before, generation=generation, begin=begin, **settings))
    return ConfigurationHistory.of(json.loads(json.dumps(actual.state())))


def test_each_configuration_has_the_offsets_from_which_it_held_and_what_it_changed() -> None:
    changed = history((0, 0, FIRST), (0, 5, FIRST), (2, 9, FIRST), (2, 12, SECOND))
    slower = history((0, 0, FIRST), (0, 7, FIRST))
    first, second = configurations([(0, changed), (1, slower)])
    assert first == {
        "generation": 0,
        "since": {0: 0, 1: 0},
        "in_force": [1],
        "changed": {"batch_rollouts": [GroupingConfig().batch_rollouts, 8]},
    }
    assert second == {
        "generation": 2,
        "since": {0: 9},
        "in_force": [0],
        "changed": {"estimator": [GroupingConfig().estimator, "grpo"]},
    }


def test_what_a_configuration_changed_is_not_guessed_where_the_one_before_it_is_not_known() -> None:
    third = replace(SECOND, batch_rollouts=4, generation=3)
    [only] = configurations([(0, history((3, 40, SECOND)))])
    assert only["changed"] is None
    second, last = configurations([(0, history((2, 40, FIRST), (3, 50, third)))])
    assert (second["changed"], last["changed"]) == (None, None)
    assert configurations([(0, ConfigurationHistory())]) == []


def test_a_summary_names_core_estimator_signatures_and_what_changed() -> None:
    key = "8a" * 32
    signed = replace(SECOND, mark_keys=(key,), environment_keys=(f"swe:{key}", f"math:{key}"))
    histories = [(0, history((0, 0, FIRST), (2, 9, signed))), (1, history((0, 0, FIRST)))]
    newest = newest_summary(histories)
    assert newest is not None
    assert (newest.generation, newest.partitions, newest.before) == (2, 1, 1)
    assert newest.text == (
        f"generation 2, core {FIRST.core_version}, estimator grpo, marks signed, signed environments math, swe, "
        "changed environment_keys, estimator, mark_keys"
    )
    first = summary(histories, 0)
    assert first.text == f"generation 0, core {FIRST.core_version}, estimator rloo, marks unsigned"


def test_a_summary_says_what_is_not_known_yet() -> None:
    unsettled = newest_summary([(0, history((0, 0, FIRST), (2, 9, FIRST)))])
    assert unsettled is not None
    assert unsettled.text == "generation 2, settings not known yet"
    assert newest_summary([(0, ConfigurationHistory())]) is None


def test_a_text_that_is_no_configuration_counts_as_unknown() -> None:
    before = initial_record(0, 1, "test", FIRST)
    for text in ("{", "[" * 100_000, "[]", '"x"', "1"):
        actual = ConfigurationHistory()
        actual.read(replace(before, watermark_configuration=text))
        newest = newest_summary([(0, actual)])
        assert newest is not None
        assert newest.facts == {"settings": "not known yet"}
    odd = ConfigurationHistory()
    odd.read(replace(before, watermark_configuration='{"mark_keys": 7, "environment_keys": [3]}'))
    assert newest_summary([(0, odd)]) is not None
