"""Memory is called flat by a rule: the line through the second half of its samples does not rise beyond a limit."""

import pytest

from tests.bench.soak import LIMIT_BYTES, ROLES, RoleMemory, report

MIB = 2**20


def memory(*sizes_mib: float) -> RoleMemory:
    sizes = tuple(round(size * MIB) for size in sizes_mib)
    return RoleMemory(role="group", seconds=tuple(map(float, range(len(sizes)))), sizes_bytes=sizes)


def test_growth_while_a_role_warms_up_does_not_count() -> None:
    warming = memory(50, 100, 200, 300, 300, 300, 300, 300)
    assert warming.growth_bytes == pytest.approx(0, abs=1)
    assert warming.is_flat


def test_the_rise_is_that_of_the_whole_second_half() -> None:
    rising = memory(0, 0, 0, 0, 100, 103, 106, 109)
    assert rising.growth_bytes == pytest.approx(9 * MIB)
    assert rising.limit_bytes == LIMIT_BYTES
    assert not rising.is_flat


def test_a_large_role_may_waver_by_a_share_of_its_memory() -> None:
    large = memory(*[1000] * 4, 1000, 1004, 1008, 1012)
    assert large.limit_bytes == pytest.approx(0.03 * 1006 * MIB)
    assert large.is_flat


def test_one_high_sample_is_no_growth() -> None:
    assert memory(*[100] * 9, 108, *[100] * 10).is_flat


def test_the_report_names_what_grew() -> None:
    roles = [memory(*range(0, 100, 10)), memory(*[100] * 8)]
    lines = report(roles, {"steps": 12}).splitlines()
    assert [line.split()[-1] for line in lines if line.startswith("group")] == ["NO", "yes"]
    assert lines[-1] == "in 9 s: 12 steps"
    assert len(set(ROLES)) == len(ROLES)
