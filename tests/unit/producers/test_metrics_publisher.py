"""Rates of the totals that a component publishes."""

from hypothesis import given
from hypothesis import strategies as st

from rollstream.producers.metrics_publisher import rates


def test_each_total_has_a_rate_and_nothing_else_has() -> None:
    now = {"tokens_total": 300.0, "errors_total": 2.0, "queue": 7.0}
    assert rates({"tokens_total": 100.0, "queue": 1.0}, now, 4.0) == {"tokens_per_s": 50.0, "errors_per_s": 0.5}


@given(st.dictionaries(st.sampled_from(["a_total", "b_total"]), st.floats(0, 1e12)), st.floats(0, 1e6))
def test_a_rate_is_a_number_even_where_no_time_has_passed_or_a_total_began_anew(
    now: dict[str, float], s: float
) -> None:
    assert all(0 <= rate < float("inf") for rate in rates({"a_total": 5.0}, now, max(s, 1e-6)).values())
    assert set(rates({}, now, 0.0).values()) <= {0.0}
