"""The load of a demo of scaling: rates that rise and fall, and rollouts that any producer may send."""

from itertools import islice

import numpy as np
import pytest

from rollstream.pipeline.config import RunConfig, ScaleDemoConfig, load
from rollstream.pipeline.launch.synthetic_load import GROUP_SIZE, duration_s, rate_at, rollouts
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.records import Rollout
from rollstream.topics.wire.validation import problems
from tests.support.paths import ROOT

LOAD = ScaleDemoConfig(low_per_s=10, high_per_s=110, low_s=5, ramp_s=10, high_s=20)


@pytest.mark.parametrize(
    ("at_s", "rate"), [(0, 10), (5, 10), (10, 60), (15, 110), (35, 110), (40, 60), (45, 10), (1000, 10)]
)
def test_the_rate_rises_holds_and_falls(at_s: float, rate: float) -> None:
    assert rate_at(LOAD, at_s) == rate
    assert duration_s(LOAD) == 45


def test_rollouts_are_valid_and_the_same_for_a_seed() -> None:
    load = ScaleDemoConfig(workers=3, tokens=16)
    first, again = (list(islice(rollouts(load, 7), 2000)) for _ in range(2))
    assert [problem for rollout in first for problem in problems(rollout)] == []
    assert len({rollout.uid for rollout in first}) == 2000
    assert {rollout.metadata.worker_id for rollout in first} == {"synthetic-0", "synthetic-1", "synthetic-2"}
    for one, other in zip(first, again, strict=True):
        assert np.array_equal(one.tokens, other.tokens)
        assert (one.uid, one.reward) == (other.uid, other.reward)
    groups: dict[str, list[Rollout]] = {}
    for rollout in first:
        groups.setdefault(rollout.group_id, []).append(rollout)
    sizes = [len(members) for members in groups.values()][:-1]
    assert set(sizes) == {GROUP_SIZE, GROUP_SIZE - 1}
    assert sizes.count(GROUP_SIZE - 1) < 0.02 * len(sizes)
    other_seed = next(rollouts(load, 8))
    assert not np.array_equal(first[0].tokens, other_seed.tokens)


@pytest.mark.parametrize(
    "flags", [["low_per_s=0"], ["high_per_s=10"], ["workers=0"], ["tokens=1"], ["ramp_s=0"], ["patience_s=0"]]
)
def test_a_load_that_is_none_is_refused(flags: list[str]) -> None:
    with pytest.raises(ConfigurationError, match=r"demo\.scale"):
        load(flags=[f"demo.scale.{flag}" for flag in flags])


def test_the_settings_of_the_demo_need_more_than_one_process_and_allow_enough() -> None:
    config: RunConfig = load(ROOT / "pipeline" / "scale.toml")
    scale, grouper = config.demo.scale, config.grouper
    assert grouper.autoscale.enabled
    assert scale.low_per_s < grouper.records_per_s < scale.high_per_s
    # Four processes have two partitions each, and bear the highest rate.
    assert 4 * grouper.records_per_s > scale.high_per_s
    assert config.topics.partitions == 8
