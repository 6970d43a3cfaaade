"""The benchmark still measures: every row, with sizes so small that its figures mean nothing."""

import math
from pathlib import Path

import pytest

from tests.bench.__main__ import ROWS, build_parser, report
from tests.bench.measure import LatencyRow, Settings
from topics.config import KafkaConfig


@pytest.mark.parametrize(
    "name", ["codec", *(pytest.param(name, marks=pytest.mark.long) for name in ROWS if name != "codec")]
)
def test_a_row_of_the_benchmark_yields_a_ratio_and_a_table_line(name: str, broker: str, tmp_path: Path) -> None:
    settings = Settings(
        kafka=KafkaConfig(bootstrap_servers=broker),
        directory=tmp_path,
        rollouts=128,
        tokens=64,
        partitions=2,
        repetitions=1,
        poll_records=32,
    )
    row = ROWS[name](settings)
    values = row.as_dict()
    assert values["name"] == name
    assert len(row.ratios) == 1
    rates = ("rollouts_per_s", "baseline_rollouts_per_s", "cpu_us_per_rollout")
    latencies = ("p50_ms", "p99_ms", "baseline_p50_ms", "baseline_p99_ms")
    for key in ("ratio", *(latencies if isinstance(row, LatencyRow) else rates)):
        assert math.isfinite(values[key]), key
        assert values[key] > 0, key
    lines = report(settings, {"cores": 2, "load_before": 0.0, "load_after": 0.0}, [row]).splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith(f"{name} ") for line in lines)


def test_the_benchmark_measures_all_rows_unless_told_otherwise() -> None:
    parser = build_parser()
    assert parser.parse_args([]).only is None
    assert parser.parse_args(["--only", "codec", "--json"]).only == ["codec"]
