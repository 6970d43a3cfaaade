"""No configuration in the log ends a task: it is in force and works, or it is an invalid record.

Names of users' makers and estimators stop a task that does not know them; tests of plug-ins cover that.
"""

import json
from typing import Any, get_type_hints

import pytest

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.testing import GroupingTestDriver, example_rollout
from rollstream.topics.records import Mark

HUGE = (1e306, -1e306, 1.7976931348623157e308, 5e-324, 1e18, -1e18, 1e9, 0.0, -0.0, 2**63 - 1, 2**63, -(2**63), 10**400)
EXTREMES: dict[Any, tuple[object, ...]] = {
    int: (0, -1, 1, 2**31, *HUGE),
    float: (float("inf"), float("-inf"), float("nan"), *HUGE),
    bool: (True, False, 2, None),
    str: ("", "\0", "x" * 100_000, None),
    tuple[str, ...]: ([], [""], ["\0"], [":"], ["env:"], ["x" * 200_000], [1], "env", None),
}
WITHIN = {
    "bounds": [f"env:{key}={value}" for key in ("max_reward", "max_tokens") for value in ("1e306", "-1", "inf", "nan")],
    "quotas": [f"env:{key}={value}" for key in ("open_groups", "bytes_per_s") for value in (1, 10**400)],
    "exclude_offsets": ["0:0-0", f"0:{10**400}-{10**401}", "0:-1-5", f"{2**63}:0-1"],
}
"""Texts of settings whose texts have numbers in them."""
KINDS = get_type_hints(GroupingConfig)


def play(driver: GroupingTestDriver, name: str) -> None:
    """Let groups seal, age, wait for the policy clock and be cut."""
    for member in range(2):
        driver.pipe(example_rollout(f"{name}-{member}", float(member), example_id=name))
        driver.pipe(
            example_rollout(f"{name}-later-{member}", float(member), example_id=f"{name}-later", policy_version=9)
        )
    driver.pipe(example_rollout(f"{name}-open", example_id=f"{name}-open"))
    driver.advance(700_000)
    driver.publish_policy_version(9)
    driver.advance(4_000_000)


@pytest.mark.parametrize("name", KINDS)
def test_a_setting_at_its_extremes_is_in_force_or_an_invalid_record(name: str) -> None:
    for value in (*EXTREMES[KINDS[name]], *([text] for text in WITHIN.get(name, ()))):
        print(f"grouping.{name} = {str(value)[:40]}")
        driver = GroupingTestDriver(GroupingConfig(batch_rollouts=2))
        play(driver, "before")
        text = json.dumps({**json.loads(GroupingConfig(generation=1).to_json()), name: value})
        offset = driver.pipe(Mark(kind="configuration", generation=1, configuration=text))
        refused = [drop.reason for drop in driver.drops if drop.offset == offset]
        assert refused in ([], ["invalid"])
        assert bool(refused) == (driver.fold.config.generation == 0)
        play(driver, "after")
        driver.crash_and_restore()
        driver.drain()
        driver.commit(snapshot=True)
        driver.crash_and_restore()
