"""The report of a demo of scaling: it passes only if processes came and went, and every rollout was read once."""

import json
import re
from dataclasses import replace

import pytest

from rollstream.pipeline.launch.scale_report import ScaleReport
from rollstream.pipeline.launch.scale_series import Coverage, Handover, ScalePoint, ScaleSeries


def series(*processes: int) -> ScaleSeries:
    return ScaleSeries(
        tuple(
            ScalePoint(
                at_s=2.0 * at, produced=100 * at, read=50 * at, lag=100 * number, processes=number, wanted=number
            )
            for at, number in enumerate(processes)
        )
    )


LEDGER = {
    "balanced": True,
    "produced": 1010,
    "batched": 800,
    "trained": 0,
    "skipped": 0,
    "dropped": {"zero_variance": 150, "late": 10},
    "dead_lettered": 0,
    "control": 10,
    "in_flight": 40,
    "unread": 0,
    "selection": {},
}
REPORT = ScaleReport(
    run="demo-1",
    seed=3,
    partitions=8,
    limit_per_s=150.0,
    high_per_s=500.0,
    fewest=1,
    rule="A process for every 300 records.",
    written=1000,
    series=series(1, 1, 3, 4, 2, 1),
    coverage=Coverage(1010, 0, 0),
    handovers=(Handover(0, "a", "b", 1, 0.5), Handover(1, "a", "b", 2, 2.5), Handover(2, "a", "b", 3, 1.0)),
    ledger=LEDGER,
    verify={"batches": 30, "mismatches": 0},
    seconds=99.0,
    kept=False,
    places={"picture": "scale.html"},
    next=("rollstream demo --scale",),
)


def test_the_report_has_the_figures_that_decide() -> None:
    assert REPORT.failures == ()
    values = json.loads(json.dumps(REPORT.as_dict()))
    assert values["passed"]
    assert values["rollouts"] == {
        "batched": 800, "dropped: late": 10, "dropped: zero_variance": 150, "open": 40, "unread": 0,
    }  # fmt: skip
    assert (values["peak_lag"], values["most_processes"]) == (400, 4)
    assert values["processes"] == [[0.0, 1], [4.0, 3], [6.0, 4], [8.0, 2], [10.0, 1]]
    assert len(values["points"]) == 6
    assert values["read"] == {"offsets": 1010, "twice": 0, "missing": 0}
    text = REPORT.as_text()
    assert "3 times a partition went to another process; its records waited 1.0 s (median), 2.5 s at most" in text
    assert "1,010 offsets read in committed transactions, 0 of them twice, 0 passed over" in text
    assert text.endswith("PASSED")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"series": series(1, 1, 1)}, "never more than 1"),
        ({"series": series(1, 4, 2)}, "2 grouping processes were left"),
        ({"written": 1001}, "1,001 rollouts were written, but 1,000 are accounted for"),
        ({"coverage": Coverage(1010, 2, 0)}, "2 offsets were read twice"),
        ({"coverage": Coverage(1010, 0, 3)}, "3 never"),
        ({"ledger": LEDGER | {"balanced": False}}, "the ledger does not balance"),
        ({"ledger": LEDGER | {"unread": 5, "batched": 795}}, "5 records were left unread"),
        ({"verify": {"batches": 30, "mismatches": 1}}, "found 1 differences"),
    ],
)
def test_a_promise_that_did_not_hold_is_named(changed: dict[str, object], words: str) -> None:
    report = replace(REPORT, **changed)  # type: ignore[arg-type]
    [failure] = report.failures
    assert words in failure
    assert not report.passed
    assert report.as_text().endswith(f"FAILED: {failure}")


def test_rates_are_means_over_three_seconds() -> None:
    produced = series(*[1] * 6).produced_per_s
    assert produced == (0.0, *[50.0] * 5)


def test_the_page_shows_the_figures_of_the_report() -> None:
    page = replace(REPORT, run="a & b").as_page()
    assert "run a &amp; b, seed 3: 1,000 rollouts over 8 partitions; one process reads at most 150 per second" in page
    assert page.count("<polyline") == 4
    assert re.search("lag</th><td>[0-9]+</td><td>[0-9]+</td><td>400</td>", page)
    assert 'processes</th><td>1</td><td>1</td><td>4</td><td data-value="1.0">1</td>' in page
    assert "<svg" not in replace(REPORT, series=ScaleSeries()).as_page()
