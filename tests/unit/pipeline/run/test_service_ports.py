"""Service ports of a run's processes: each has its own, the same at each start, and all are listed for Prometheus."""

import json
from pathlib import Path

import pytest

from rollstream.pipeline.config import load
from rollstream.pipeline.run.plan import plan
from rollstream.pipeline.run.service_ports import ServicePorts


def test_without_a_port_nothing_is_added_and_nothing_written(tmp_path: Path) -> None:
    config = load(flags=[f"data_dir={tmp_path}"])
    roles = plan(config, Path("run.toml"))
    ports = ServicePorts(config)
    assert ports.place(roles.of("learn")[0]) is roles.of("learn")[0]
    assert not ports.path.exists()


def test_every_process_gets_a_port_after_that_of_the_supervisor_and_keeps_it(tmp_path: Path) -> None:
    config = load(flags=[f"data_dir={tmp_path}", "service.port=9100", "grouper.processes=2"])
    roles = plan(config, Path("run.toml"))
    ports = ServicePorts(config)
    placed = [ports.place(spec) for spec in (*roles.consumers, *roles.of("env"))]
    assert [spec.arguments[-1] for spec in placed] == [f"service.port={port}" for port in range(9101, 9107)]
    assert ports.place(roles.of("group")[1]) == placed[3]
    targets = json.loads(ports.path.read_text())
    assert {entry["labels"]["__meta_process"]: entry["targets"] for entry in targets} == {
        "supervisor": ["127.0.0.1:9100"],
        **{spec.name: [f"127.0.0.1:{port}"] for port, spec in enumerate(placed, 9101)},
    }
    assert {entry["labels"]["__meta_run"] for entry in targets} == {"main"}


def test_a_list_that_cannot_be_written_is_logged_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "runs").write_text("a file where the folder should be")
    config = load(flags=[f"data_dir={tmp_path}", "service.port=9100"])
    ports = ServicePorts(config)
    spec = plan(config, Path("run.toml")).of("group")[0]
    with caplog.at_level("WARNING"):
        assert ports.place(spec).arguments[-1] == "service.port=9101"
        ports.retire(spec.name)
    assert [record.message for record in caplog.records] == ["targets_not_written"] * 2


def test_a_process_that_was_retired_is_not_listed_until_it_comes_back_with_its_port(tmp_path: Path) -> None:
    config = load(flags=[f"data_dir={tmp_path}", "service.port=9100", "grouper.processes=2"])
    first, second = plan(config, Path("run.toml")).of("group")
    ports = ServicePorts(config)
    placed = ports.place(first), ports.place(second)

    def listed() -> list[str]:
        return [entry["labels"]["__meta_process"] for entry in json.loads(ports.path.read_text())]

    ports.retire("group-1")
    assert listed() == ["supervisor", "group-0"]
    assert ports.place(second) == placed[1]
    assert listed() == ["supervisor", "group-0", "group-1"]
