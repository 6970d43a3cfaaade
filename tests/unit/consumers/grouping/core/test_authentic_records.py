"""Marks and rollouts that are not signed by a key in force are dropped with a reason, and change nothing."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core import task_state
from rollstream.consumers.grouping.core.configuration_marks import DRAIN_AGE_S
from rollstream.consumers.grouping.core.effects import InputRecord
from rollstream.consumers.grouping.core.fold import Fold
from rollstream.consumers.grouping.testing import GroupingTestDriver, example_rollout
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.records import GroupCancelled, Mark, Rollout
from rollstream.topics.wire.keys import encode_key
from rollstream.topics.wire.signatures import ROLLOUT, Signer, mark_context, write_key
from tests.support.pairs import driver, pair, reasons, uids


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Signer:
    return new_signer(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Signer:
    return new_signer(tmp_path_factory.mktemp("theirs"))


def new_signer(folder: Path) -> Signer:
    write_key(folder / "key.pem")
    return Signer(f"file:{folder / 'key.pem'}", "signing_key")


def append(d: GroupingTestDriver, record: Mark | Rollout | GroupCancelled, signer: Signer, partition: int = 0) -> None:
    mark = isinstance(record, Mark)
    key = encode_key("mark", record.kind) if mark else encode_key(record.environment, record.example_id)
    value = signer.signed(record, mark_context(partition) if mark else ROLLOUT)
    d.pipe(InputRecord(d.end, d.now_ms, key, value))


def configuration(config: GroupingConfig) -> Mark:
    return Mark(kind="configuration", generation=config.generation, configuration=config.to_json())


def hostile(config: GroupingConfig) -> list[Mark]:
    """Marks that a red team wrote: each would stop, starve or redirect a run."""
    further = replace(config, generation=1)
    return [
        Mark(kind="policy_version", policy_version=1000),
        Mark(kind="deadline", policy_version=1000),
        Mark(kind="drain", wall_time=0.001),
        configuration(replace(further, exclude_environments=("env",))),
        configuration(replace(further, estimator="grpo")),
        configuration(replace(further, mark_keys=())),
        configuration(replace(further, mark_keys=("0" * 64,))),
    ]


@pytest.mark.parametrize("signed", ["not at all", "by another key", "for another partition"])
@pytest.mark.parametrize("number", range(7))
def test_a_mark_of_somebody_else_is_dropped_and_changes_nothing(
    ours: Signer, theirs: Signer, signed: str, number: int
) -> None:
    d = driver(mark_keys=(ours.public,), batch_rollouts=4)
    pair(d, "first")
    before, mark = d.fold.config, hostile(d.fold.config)[number]
    version = d.fold.policy_version
    if signed == "not at all":
        d.pipe(mark)
    else:
        append(d, mark, theirs if signed == "by another key" else ours, partition=0 if "key" in signed else 1)
    assert (d.fold.config, d.fold.policy_version) == (before, version)
    assert reasons(d) == {2: "invalid"}
    assert "that no key of grouping.mark_keys signed for this partition" in d.drops[0].detail
    d.crash_and_restore()
    pair(d, "second")
    assert uids(d) == [("firsta", "firstb", "seconda", "secondb")]
    assert {batch.generation for batch in d.batches} == {0}


def test_marks_of_the_key_in_force_are_obeyed_and_keys_change_by_generation(ours: Signer, theirs: Signer) -> None:
    d = driver(mark_keys=(ours.public,), batch_rollouts=100)
    append(d, Mark(kind="policy_version", policy_version=3), ours)
    assert d.fold.policy_version == 3
    both = replace(d.fold.config, generation=1, mark_keys=(ours.public, theirs.public))
    append(d, configuration(both), ours)
    append(d, configuration(replace(both, generation=2, mark_keys=(theirs.public,))), theirs)
    append(d, Mark(kind="policy_version", policy_version=4), ours)
    append(d, Mark(kind="policy_version", policy_version=5), theirs)
    assert (d.fold.config.generation, d.fold.policy_version) == (2, 5)
    assert [drop.offset for drop in d.drops] == [3]
    d.crash_and_restore()
    assert (d.fold.config.generation, d.fold.policy_version) == (2, 5)


def test_a_drain_mark_appended_again_by_somebody_else_cuts_nothing_later(ours: Signer) -> None:
    d = driver(mark_keys=(ours.public,), batch_rollouts=100)
    pair(d, "first")
    mark = Mark(kind="drain", wall_time=d.now_ms / 1000)
    append(d, mark, ours)
    assert uids(d) == [("firsta", "firstb")]
    pair(d, "second")
    d.now_ms += (DRAIN_AGE_S + 1) * 1000
    append(d, mark, ours)
    assert "s before it was appended" in d.drops[-1].detail


def test_a_deadline_needs_no_signature_because_every_record_tells_the_time(ours: Signer) -> None:
    d = driver(mark_keys=(ours.public,), group_deadline_s=1.0)
    d.pipe(example_rollout("alone"))
    d.advance(5000)
    assert reasons(d) == {0: "group_too_small"}


def cancelled(*uids_: str) -> GroupCancelled:
    return GroupCancelled(environment="env", example_id="e", policy_version=0, group_size=2, uids=uids_)


def test_rollouts_and_cancellations_of_an_environment_are_those_of_its_keys(ours: Signer, theirs: Signer) -> None:
    d = driver(environment_keys=(f"env:{ours.public}",), batch_rollouts=2)
    append(d, example_rollout("a", 1.0, example_id="e"), ours)
    append(d, example_rollout("impostor", 1000.0, example_id="e"), theirs)
    d.pipe(example_rollout("stranger", 1000.0, example_id="e"))
    append(d, cancelled("a", "b"), theirs)
    d.pipe(cancelled("a", "b"))
    append(d, example_rollout("b", 0.0, example_id="e"), ours)
    for uid in "xy":
        d.pipe(example_rollout(uid, float(uid == "x"), environment="open"))
    assert uids(d) == [("a", "b"), ("x", "y")]
    assert reasons(d) == dict.fromkeys(range(1, 5), "invalid")
    assert {drop.detail for drop in d.drops} == {"no key of environment env in grouping.environment_keys signed it"}
    assert set(d.batches[0].rewards.tolist()) == {0.0, 1.0}


def test_a_rollout_signed_as_a_mark_is_none(ours: Signer) -> None:
    d = driver(environment_keys=(f"env:{ours.public}",))
    rollout = example_rollout("a")
    d.pipe(InputRecord(d.end, d.now_ms, encode_key("env", rollout.example_id), ours.signed(rollout, mark_context(0))))
    assert reasons(d) == {0: "invalid"}


def replayed(d: GroupingTestDriver, change: Callable[[GroupingConfig], GroupingConfig]) -> list[Any]:
    """Replay a driver's log under changed configurations; return the configuration in force after each record."""
    fold = Fold(task_state.restored_state(d.journal[:1]), change=change)
    in_force = []
    for record in d.log:
        fold.apply(record)
        in_force.append(fold.config)
    return in_force


def test_a_replay_changes_configurations_of_authentic_marks_and_obeys_no_others(ours: Signer, theirs: Signer) -> None:
    d = driver(mark_keys=(ours.public,))
    first = replace(d.fold.config, generation=1, max_policy_lag=2)
    append(d, configuration(replace(first, generation=5)), theirs)
    append(d, configuration(first), ours)
    pair(d)
    changed = replayed(d, lambda config: replace(config, estimator="grpo"))
    assert [config.generation for config in changed] == [0, 1, 1, 1]
    assert changed[-1] == replace(first, estimator="grpo")


def refuse(config: GroupingConfig) -> GroupingConfig:
    raise ConfigurationError("it fits no configuration")


def test_a_configuration_that_a_change_does_not_fit_stays_as_it_is() -> None:
    d = driver()
    d.configure(replace(d.fold.config, max_policy_lag=2))
    assert replayed(d, refuse) == [d.fold.config]


def test_keys_and_quotas_are_part_of_the_configuration_in_the_log(ours: Signer) -> None:
    for name, value in (
        ("mark_keys", ours.public),
        ("environment_keys", f"env:{ours.public}"),
        ("quotas", "env:open_groups=3"),
    ):
        config = GroupingConfig(**{name: (value,)})  # type: ignore[arg-type]
        assert GroupingConfig.from_json(config.to_json()) == config


def test_other_rewards_are_those_of_signed_rollouts_and_are_within_the_bounds(ours: Signer, theirs: Signer) -> None:
    config = GroupingConfig(environment_keys=(f"env:{ours.public}",), batch_rollouts=2, max_reward=1.0)
    records = []
    for offset, (example_id, signer) in enumerate((("a", ours), ("a", ours), ("b", ours), ("b", ours), ("c", theirs))):
        rollout = example_rollout(f"{example_id}{offset}", 0.0, example_id=example_id)
        key = encode_key("env", example_id)
        records.append(InputRecord(offset, 0, key, signer.signed(rollout, ROLLOUT)))
    first = replace(task_state.initial_record(0, 1, "test", config), policy_version=0, watermark_policy_version=0)
    fold = Fold(task_state.restored_state([first]), rewards={0: 1.0, 2: 7.0, 4: 1.0})
    for record in records:
        fold.apply(record)
    effects = fold.prepare_commit()
    assert [batch.rewards.tolist() for batch in effects.batches] == [[1.0, 0.0]]
    reasons = {drop.offset: drop.detail for drop in effects.journal.drops if drop.reason == "invalid"}
    assert "reward 7" in reasons[2]
    assert "no key of environment env" in reasons[4]
    assert set(reasons) == {2, 4}
