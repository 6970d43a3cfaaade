"""Measurements are written to a file, and compared with an earlier one row by row."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollstream.topics.config import KafkaConfig
from tests.bench.__main__ import main
from tests.bench.comparison import Comparison, compared, comparison_table, read_document
from tests.bench.measure import Row, Settings, Timing
from tests.bench.report import report
from tests.bench.rows import QUICK, ROWS, needs_broker

SETTINGS = {"rollouts": 1000, "tokens": 2560, "repetitions": 2}
FEW = ["--only=codec", "--rollouts=16", "--tokens=8", "--repetitions=2"]


def document(settings: dict[str, int] = SETTINGS, **ratios: tuple[float, ...]) -> dict[str, Any]:
    rows = [{"name": name, "ratios": list(values)} for name, values in ratios.items()]
    return {"settings": settings, "rows": [row | ({"p99_ms": 1.0} if row["name"] == "late" else {}) for row in rows]}


def comparison(then: tuple[float, ...], now: tuple[float, ...], name: str = "codec") -> Comparison:
    return compared(document(**{name: then}), document(**{name: now}))


@pytest.mark.parametrize(
    ("then", "now", "name", "verdict"),
    [
        ((0.5, 0.6), (0.7, 0.8), "codec", "better"),
        ((0.5, 0.6), (0.3, 0.4), "codec", "worse"),
        ((0.5, 0.6), (0.6, 0.9), "codec", "same"),
        ((2.0, 3.0), (1.0, 1.5), "late", "better"),
        ((2.0, 3.0), (4.0, 5.0), "late", "worse"),
        ((0.5,), (0.9, 1.0), "codec", "once"),
    ],
)
def test_a_row_differs_where_the_ranges_of_its_ratios_do_not_meet(
    then: tuple[float, ...], now: tuple[float, ...], name: str, verdict: str
) -> None:
    assert [row.verdict for row in comparison(then, now, name).rows] == [verdict]


def test_rows_of_one_measurement_and_other_settings_are_named() -> None:
    result = compared(
        document(codec=(1.0,), fold=(1.0,)), document({**SETTINGS, "rollouts": 8000}, codec=(1.0,), feed=())
    )
    assert (result.only_then, result.only_now) == (("fold",), ("feed",))
    assert result.other_settings == ("rollouts 1000 then, 8000 now",)
    table = comparison_table(result, "old.json", 80)
    assert "only then: fold" in table
    assert max(map(len, table.splitlines())) <= 80


def test_a_measurement_is_written_and_compared_with_the_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    assert main([*FEW, f"--output={first}"]) == 0
    assert read_document(first)["settings"] == {"rollouts": 16, "tokens": 8, "repetitions": 2}
    capsys.readouterr()
    assert main([*FEW, f"--output={second}", f"--compare={first}"]) == 0
    assert "compared with" in capsys.readouterr().out
    assert main([*FEW, f"--output={second}", f"--compare={first}", "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)["comparison"]["rows"]
    assert row["then"] == read_document(first)["rows"][0]["ratios"]


def test_a_file_that_is_no_measurement_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text("[]")
    with pytest.raises(ValueError, match="is not a measurement; give a file"):
        main([*FEW, f"--compare={other}"])


def test_the_quick_form_measures_rows_that_the_full_one_has() -> None:
    assert set(QUICK) < set(ROWS)
    assert needs_broker(QUICK)
    assert not needs_broker(["codec", "codec-32k", "step"])


def test_long_rollouts_are_fewer_and_short_ones_not_very_many() -> None:
    settings = Settings(kafka=KafkaConfig(), directory=Path(), rollouts=8000, tokens=2560)
    assert (settings.with_length(32_768).rollouts, settings.with_length(32_768).poll_records) == (624, 78)
    assert settings.with_length(256).rollouts == 16_000
    assert settings.with_rollouts(128).with_length(32_768).rollouts == 64


def test_the_longest_name_leaves_room_for_the_figures() -> None:
    timing = Timing(10_000, 1.0, 9.0)
    name = max(ROWS, key=len)
    row = Row(name=name, what="x", baseline="y", size_bytes=9000, ours=(timing,), raw=(timing,), tokens=2560)
    values = row.as_dict()
    assert (values["mb_per_s"], values["tokens_per_s"]) == (90.0, 25_600_000)
    settings = Settings(kafka=KafkaConfig(), directory=Path())
    lines = report(settings, {"cores": 2, "load_before": 0.0, "load_after": 0.0}, [row]).splitlines()
    assert max(map(len, lines)) <= 80
    assert len([line for line in lines if line.startswith(f"{name} ")]) == 2
