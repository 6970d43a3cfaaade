"""The benchmark still measures: every row of the quick form, with sizes so small that its figures mean nothing."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from rollstream.topics.config import KafkaConfig
from tests.bench import latency_row
from tests.bench.__main__ import build_parser, main
from tests.bench.measure import LatencyRow, Row, Settings
from tests.bench.report import report
from tests.bench.rows import QUICK, ROWS
from tests.support.runs import RealRun


@pytest.mark.long
@pytest.mark.parametrize("name", QUICK)
def test_a_row_of_the_benchmark_yields_a_ratio_and_a_table_line(
    name: str, broker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "jax" in sys.modules:
        # An earlier test imported it, with more threads than rows ask for. The figures mean nothing here.
        monkeypatch.setenv("NPROC", "1")
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


def test_a_row_that_fails_is_reported_and_the_others_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail(_settings: Settings) -> Row:
        raise RuntimeError("no figures today")

    monkeypatch.setitem(ROWS, "fold-1k", fail)
    few = ["--only", "fold-1k", "--only", "codec", "--rollouts=128", "--tokens=64", "--repetitions=1"]
    few += ["--output", str(tmp_path / "figures.json")]
    assert main(few) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("codec ") for line in lines)
    assert lines[-1] == "fold-1k FAILED: RuntimeError: no figures today"
    assert main([*few, "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in printed["rows"]] == ["codec"]
    assert printed["failed"] == {"fold-1k": "RuntimeError: no figures today"}


def settings_of(kafka: KafkaConfig, directory: Path, **changes: int) -> Settings:
    return Settings(kafka=kafka, directory=directory, partitions=2, repetitions=1, poll_records=32, **changes)


@pytest.mark.long
def test_latency_is_measured_though_the_broker_is_slower_than_the_rate(broker: str, tmp_path: Path) -> None:
    # The queue has room for only a few rollouts, so it is full as with a busy broker.
    kafka = KafkaConfig(bootstrap_servers=broker, client={"queue.buffering.max.kbytes": "64"})
    row = latency_row.row("latency", 100_000)(settings_of(kafka, tmp_path, rollouts=256, tokens=2560))
    assert row.as_dict()["measured"] > 0
    assert 0 < row.figures["rollouts/s"] < 100_000
    assert "seen: rollouts/s" in report(
        settings_of(kafka, tmp_path), {"cores": 2, "load_before": 0.0, "load_after": 0.0}, [row]
    )


def wait_out(watch: latency_row.Watch, readable: int) -> None:
    while watch.waits(readable):
        pass


def test_latency_that_cannot_be_measured_says_how_far_it_was(real_run: RealRun, tmp_path: Path) -> None:
    run = real_run.prepare()
    settings = settings_of(run.kafka, tmp_path, rollouts=8, tokens=8)
    with subprocess.Popen(["sleep", "600"], text=True) as child:
        with latency_row.Production(settings, run.name, 1000, 0) as production, run.open_transaction("batches"):
            watch = latency_row.Watch(production, child, run.topic("batches"), 8, 3.0)
            with pytest.raises(RuntimeError) as failure:
                wait_out(watch, 3)
        text = str(failure.value)
        assert text.startswith("for 3 s nothing was acknowledged and nothing became readable; 8 of 8 rollouts were ack")
        assert "3 of 8 became readable" in text
        assert f"{run.topic('batches')}[0] from offset 0 on" in text
        child.kill()
        child.wait()
        with pytest.raises(RuntimeError, match="the measured process exited with -9; 8 of 8"):
            watch.waits(3)


def test_the_benchmark_measures_all_rows_unless_told_otherwise() -> None:
    parser = build_parser()
    assert parser.parse_args([]).only is None
    assert parser.parse_args(["--only", "codec", "--json"]).only == ["codec"]
