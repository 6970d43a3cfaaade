"""An environment beyond its quotas loses its own groups, oldest first; no other environment loses any."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core.effects import InputRecord
from rollstream.consumers.grouping.core.limits import BURST_S, Quota, parse_quotas
from rollstream.consumers.grouping.testing import GroupingTestDriver, example_rollout
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.wire.codec import REGISTRY_PREFIX_SIZE, encode, framed_for_registry
from rollstream.topics.wire.keys import encode_key
from tests.support.pairs import driver, reasons


def open_group(d: GroupingTestDriver, environment: str, example_id: str) -> None:
    d.pipe(example_rollout(f"{environment}-{example_id}", 1.0, environment=environment, example_id=example_id))


def test_the_oldest_open_group_of_the_environment_goes_first() -> None:
    d = driver(quotas=("noisy:open_groups=2",))
    open_group(d, "quiet", "first")
    for number in range(4):
        open_group(d, "noisy", str(number))
    assert reasons(d) == {1: "quota", 2: "quota"}
    assert d.drops[0].detail == "the environment exceeds grouping.quotas noisy:open_groups=2"
    assert d.fold.open_groups == 3
    d.crash_and_restore()
    open_group(d, "noisy", "4")
    assert reasons(d) == {1: "quota", 2: "quota", 3: "quota"}
    assert d.fold.open_groups == 3


@given(
    st.lists(st.tuples(st.sampled_from(["noisy", "quiet"]), st.integers(0, 5), st.booleans()), max_size=60),
    st.integers(1, 4),
)
def test_an_environment_never_costs_another_one_a_group(groups: list[tuple[str, int, bool]], most: int) -> None:
    limited, alone = driver(quotas=(f"noisy:open_groups={most}",)), driver()
    for number, (environment, example, second) in enumerate(groups):
        rollout = example_rollout(
            f"{environment}{number}", float(second), environment=environment, example_id=str(example)
        )
        limited.pipe(rollout)
        if environment == "quiet":
            alone.pipe(rollout)
        assert limited.fold.open_groups <= most + alone.fold.open_groups
    quiet = [drop.reason for drop in limited.drops if drop.environment == "quiet"]
    assert quiet == [drop.reason for drop in alone.drops]
    before = limited.fold.open_groups, limited.fold.held_bytes
    limited.commit(snapshot=True)
    limited.crash_and_restore()
    assert (limited.fold.open_groups, limited.fold.held_bytes) == before


def test_quotas_are_parsed_or_refused() -> None:
    both = parse_quotas(["a:b:open_groups=3", "a:b:held_bytes=4", "c:open_groups=1"])
    assert both == {"a:b": Quota(3, 4), "c": Quota(open_groups=1)}
    for text in (
        "a",
        "open_groups=3",
        ":open_groups=3",
        "a:groups=3",
        "a:open_groups=0",
        "a:open_groups=-1",
        "a:open_groups=²",
    ):
        with pytest.raises(ConfigurationError, match=r"grouping\.quotas: .* is not a quota"):
            GroupingConfig(quotas=(text,))


def test_an_environment_may_write_at_its_rate_and_what_a_minute_allows_at_once() -> None:
    d = driver(quotas=("noisy:rollouts_per_s=2",))
    for number in range(130):
        open_group(d, "noisy", str(number))
    assert reasons(d) == dict.fromkeys(range(120, 130), "quota")
    assert d.drops[0].detail == "the environment exceeds grouping.quotas noisy:rollouts_per_s=2"
    d.now_ms += 1500
    for number in range(130, 134):
        open_group(d, "noisy", str(number))
    assert [offset for offset in reasons(d) if offset >= 130] == [133]


def test_the_prefix_of_a_registry_does_not_count() -> None:
    rollouts = [example_rollout(uid, reward) for uid, reward in (("1" * 25, 1.0), ("2" * 25, 0.0))]
    values = [encode(rollout) for rollout in rollouts]
    rate = -(-sum(map(len, values)) // BURST_S)
    assert sum(map(len, values)) <= rate * BURST_S < sum(map(len, values)) + 2 * REGISTRY_PREFIX_SIZE
    d = driver(quotas=(f"env:bytes_per_s={rate}",))
    for offset, value in enumerate(values):
        d.pipe(InputRecord(offset, d.now_ms, encode_key("env", "0"), framed_for_registry(value, 7)))
    assert reasons(d) == {}


def test_a_clock_that_jumped_ahead_stops_no_rate() -> None:
    d = driver(quotas=("env:rollouts_per_s=1",))
    d.now_ms = 3_600_000
    open_group(d, "env", "ahead")
    for number in range(BURST_S + 10):
        d.now_ms = 1000 * number
        open_group(d, "env", str(number))
    assert reasons(d) == {}


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 5000), st.booleans()), max_size=80),
    st.integers(1, 20),
    st.integers(0, 79),
)
def test_a_crash_anywhere_changes_no_level(records: list[tuple[str, int, bool]], rate: int, crash: int) -> None:
    quotas = (f"a:bytes_per_s={rate}", f"a:rollouts_per_s={rate}", "b:rollouts_per_s=1")
    whole, crashed = driver(quotas=quotas), driver(quotas=quotas)
    for number, (environment, elapsed_ms, commits) in enumerate(records):
        for d in (whole, crashed):
            d.now_ms += elapsed_ms
            open_group(d, environment, str(number // 2))
        if commits:
            crashed.commit(snapshot=number % 3 == 0)
        if number == crash:
            crashed.crash_and_restore()
    assert whole.commit().rates == crashed.commit().rates
    assert reasons(whole) == reasons(crashed)


def test_few_environments_have_rates() -> None:
    with pytest.raises(ConfigurationError, match="rates of 501 environments; limit at most 500"):
        parse_quotas(f"e{number}:rollouts_per_s=1" for number in range(501))
