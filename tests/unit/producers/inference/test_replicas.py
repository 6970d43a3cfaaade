"""Choice of servers: sessions stay, failed and lagging servers are passed over, retries are bounded."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.producers.inference.replicas import Replica, ReplicaSet, RetryBudget

URLS = [f"http://h{number}:8000/v1" for number in range(4)]
SESSIONS = [f"w.1.{number}" for number in range(400)]


def servers(*, max_version_skew: int = 2) -> ReplicaSet:
    return ReplicaSet(URLS, max_version_skew=max_version_skew, random_seed=0)


def chosen(replicas: ReplicaSet, now: float = 0.0) -> dict[str, str]:
    return {session: replicas.choose(session, now).url for session in SESSIONS}


def test_sessions_spread_evenly_and_stay_in_every_process() -> None:
    before = chosen(servers())
    assert set(before.values()) == set(URLS)
    assert all(60 <= count <= 140 for count in Counter(before.values()).values())
    assert chosen(ReplicaSet(reversed(URLS), max_version_skew=2, random_seed=7)) == before


def test_only_sessions_of_a_failed_server_move_and_they_return_after_a_look() -> None:
    replicas = servers()
    before = chosen(replicas)
    lost = replicas.replicas[1]
    replicas.failed(lost, 10.0)
    moved = {session for session, url in chosen(replicas, 10.0).items() if url != before[session]}
    assert moved == {session for session, url in before.items() if url == lost.url}
    rested = lost.ready_at
    assert chosen(replicas, rested) == chosen(replicas, 10.0), "it gets no requests before it has answered a look"
    assert replicas.to_look_at(rested) == [lost]
    assert replicas.to_look_at(rested + 0.5) == [], "looks are a second apart"
    replicas.answered(lost, -1, rested)
    assert chosen(replicas, rested) == before


def test_a_lagging_server_is_passed_over_until_it_has_caught_up() -> None:
    replicas = servers(max_version_skew=2)
    for replica in replicas.replicas:
        replicas.answered(replica, 7, 0.0)
    slow, *others = replicas.replicas
    before = chosen(replicas)
    replicas.answered(others[0], 9, 0.0)
    assert chosen(replicas) == before, "two behind is allowed"
    for replica in others:
        replicas.answered(replica, 10, 0.0)
    assert slow.url not in chosen(replicas).values()
    assert replicas.to_look_at(0.0 + 5.0) == [slow]
    replicas.answered(slow, 8, 0.0)
    assert chosen(replicas) == before
    assert replicas.newest_version == 10


def test_a_lagging_server_serves_where_no_other_is_up_and_no_skew_is_no_limit() -> None:
    replicas = servers(max_version_skew=0)
    slow, *others = replicas.replicas
    replicas.answered(slow, 1, 0.0)
    for replica in others:
        replicas.answered(replica, 9, 0.0)
        replicas.failed(replica, 5.0)
    assert set(chosen(replicas, 5.0).values()) == {slow.url}
    unlimited = servers(max_version_skew=-1)
    unlimited.answered(unlimited.replicas[0], 1, 0.0)
    unlimited.answered(unlimited.replicas[1], 100, 0.0)
    assert not any(map(unlimited.lags, unlimited.replicas))


def test_servers_that_name_no_version_never_lag() -> None:
    replicas = servers(max_version_skew=0)
    replicas.answered(replicas.replicas[0], 12, 0.0)
    assert set(chosen(replicas).values()) == set(URLS)


def test_a_server_rests_as_long_as_it_asks_and_requests_that_fail_together_count_once() -> None:
    replicas = ReplicaSet(URLS[:1], max_version_skew=2)
    [only] = replicas.replicas
    replicas.failed(only, 1.0, retry_after_s=7.5)
    assert (replicas.choose("s", 1.0), only.ready_at) == (only, 8.5)
    for _ in range(64):
        replicas.failed(only, 2.0)
    assert (only.failures, only.ready_at) == (1, 8.5)


def test_answers_to_earlier_requests_do_not_end_the_rest_that_a_server_asks_for() -> None:
    replicas = ReplicaSet(URLS[:2], max_version_skew=2)
    full, other = replicas.replicas
    replicas.failed(full, 100.0, retry_after_s=30.0)
    replicas.answered(full, 5, 101.0)
    assert (full.version, full.ready_at, replicas.choose("s", 101.0)) == (5, 130.0, other)
    replicas.answered(full, 5, 130.0)
    assert (full.failures, full.ready_at) == (0, 0.0)
    replicas.failed(full, 200.0)
    replicas.answered(full, 5, 200.0)
    assert full.ready_at == 0.0, "it did not ask"


def test_a_probe_tells_the_version_and_ends_no_rest() -> None:
    replicas = ReplicaSet(URLS[:2], max_version_skew=2)
    resting, other = replicas.replicas
    replicas.failed(resting, 1.0, retry_after_s=7.5)
    replicas.looked(resting, 9, 2.0)
    assert (resting.version, replicas.choose("s", 2.0)) == (9, other)
    replicas.looked(resting, 9, 8.5)
    assert resting.failures == 0


def test_a_server_that_was_restarted_has_the_version_that_it_tells_now_or_none() -> None:
    replicas = ReplicaSet(URLS[:2], max_version_skew=2)
    restarted, other = replicas.replicas
    for replica in (restarted, other):
        replicas.looked(replica, 40, 1.0)
    replicas.looked(restarted, 3, 2.0)
    assert replicas.lags(restarted)
    replicas.looked(restarted, -1, 3.0)
    assert replicas.lags(restarted)
    assert set(chosen(replicas).values()) == {other.url}
    replicas.looked(restarted, 40, 4.0)
    assert not replicas.lags(restarted)


def test_a_server_that_names_versions_only_in_answers_does_not_lag() -> None:
    replicas = ReplicaSet(URLS[:2], max_version_skew=2)
    only_answers, _other = replicas.replicas
    replicas.looked(only_answers, -1, 1.0)
    replicas.answered(only_answers, 7, 0.0)
    replicas.looked(only_answers, -1, 2.0)
    assert (only_answers.version, replicas.lags(only_answers)) == (7, False)


@given(st.lists(st.floats(0.0, 3.0), min_size=1, max_size=40))
def test_a_failing_server_rests_longer_up_to_two_seconds(gaps: list[float]) -> None:
    replica = Replica(URLS[0])
    replicas = ReplicaSet([], max_version_skew=0)
    now = 0.0
    for gap in gaps:
        now = max(now, replica.ready_at) + gap
        replicas.failed(replica, now)
        assert 0.05 <= replica.ready_at - now <= 2.0
    assert replica.failures == len(gaps)


@given(st.lists(st.floats(0.0, 2.0), min_size=1, max_size=300))
def test_no_second_holds_more_retries_than_the_budget(gaps: list[float]) -> None:
    budget, now, made = RetryBudget(burst=8, per_s=4.0), 0.0, []
    for gap in gaps:
        now += gap
        made.append(now + budget.reserve(now))
    for at in made:
        assert sum(at <= other < at + 1.0 - 1e-6 for other in made) <= 8 + 4 + 1


def test_a_storm_of_failures_is_stretched_to_the_rate() -> None:
    budget = RetryBudget(burst=64, per_s=10.0)
    waits = [budget.reserve(100.0) for _ in range(164)]
    assert waits[:64] == [0.0] * 64
    assert 9.9 <= waits[-1] <= 10.1
    assert budget.reserve(1000.0) == 0.0, "an idle time fills it again"


def test_requests_that_give_up_leave_the_rate_to_others() -> None:
    budget = RetryBudget(burst=64, per_s=10.0)
    waits = [budget.reserve(100.0, deadline=160.0) for _ in range(2000)]
    assert sum(wait < math.inf for wait in waits) == pytest.approx(64 + 60 * 10, abs=1)
    assert max(wait for wait in waits if wait < math.inf) < 60.0
    assert budget.reserve(162.0) < 0.2, "requests after the storm are retried at once"
