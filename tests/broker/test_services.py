"""Service ports of a real run: each process is alive while its loop turns, ready until it is asked to stop."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollstream.infra.broker.ports import free_port, free_port_row
from rollstream.infra.monitoring import alerts, dashboard
from rollstream.pipeline.audit.ledger import ledger
from rollstream.topics.config import KafkaConfig
from rollstream.topics.metrics.catalogue import of_role
from tests.broker.test_control_run import COUNTING, book_of, start
from tests.broker.test_serving_run import SMALL
from tests.support.page import PageClient
from tests.support.probes import lacking, probe, scrape
from tests.support.producing import serving_http
from tests.support.runs import RealRun
from tests.support.serving_engines import VllmStandIn
from tests.support.waiting import eventually

LABELER = '''
import time
from pathlib import Path


def patient(trajectory):
    """Labels once the file `labels` is there, and goes on waiting for it until then."""
    from counting import judge

    while not Path("labels").exists():
        time.sleep(0.05)
    return judge(trajectory)
'''


@pytest.fixture
def run(real_run: RealRun) -> RealRun:
    folder = real_run.directory / "task"
    folder.mkdir()
    (folder / "counting.py").write_text(COUNTING)
    (folder / "labeler.py").write_text(LABELER)
    real_run.python_path = (folder,)
    return real_run


@pytest.mark.long
def test_a_loop_that_is_stuck_is_not_alive_and_who_is_asked_to_stop_is_not_ready_and_loses_nothing(
    run: RealRun,
) -> None:
    base = free_port_row("127.0.0.1", 5)
    settings = {"service__port": base, "service__stall_s": 5, "supervisor__stop_timeout_s": 300, "ui__port": 0}
    running = start(run, labeling__labeler="labeler:patient", collect__trajectories=0, **settings)
    listed = run.directory / "runs" / run.name / "targets.json"
    eventually(lambda: len(json.loads(listed.read_text())) == 5, 120, "a port for every process")
    urls = {e["labels"]["__meta_process"]: f"http://{e['targets'][0]}" for e in json.loads(listed.read_text())}
    assert set(urls) == {"supervisor", "fill", "label-0", "collect-0", "collect-1"}
    assert urls["supervisor"].endswith(f":{base}")

    address = re.compile(rf"^page of run {run.name}: (http://\S+)$", re.MULTILINE)
    line = eventually(lambda: address.search(run.log_of(running)), 120, "the address of the page beside the run")
    assert PageClient(line[1]).json(f"/api/runs/{run.name}/overview")["top"]["run"] == run.name

    for url in urls.values():
        eventually(lambda url=url: probe(f"{url}/readyz") == (200, "ok\n"), 120, f"{url} to be ready")
    eventually(lambda: probe(f"{urls['label-0']}/livez")[0] == 503, 120, "the labeler to be stuck")
    assert "labeling: no progress for" in probe(f"{urls['label-0']}/livez")[1]
    others = {name: probe(f"{url}/livez") for name, url in urls.items() if name != "label-0"}
    assert set(others.values()) == {(200, "ok\n")}, others

    for name, url in urls.items():
        role = {"supervisor": "run"}.get(name, name.partition("-")[0])
        eventually(lambda url=url, role=role: not lacking(scrape(url)[0], role), 120, f"every metric of {name}")
        series, places = scrape(url)
        assert series["rollstream_uncatalogued_metrics"] == {(): 0.0}
        assert places == {(run.name, "run" if role == "run" else name)}
    played, _places = scrape(urls["collect-0"])
    assert played["rollstream_collecting_steps_total"][()] > played["rollstream_collecting_trajectories_total"][()] > 0

    os.kill(pid_of(run, "fill"), signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        probe(f"{urls['fill']}/livez", timeout_s=2.0)
    os.kill(pid_of(run, "fill"), signal.SIGCONT)
    eventually(lambda: probe(f"{urls['fill']}/livez")[0] == 200, 60, "a process that goes on to be alive again")

    running.terminate()
    eventually(lambda: probe(f"{urls['supervisor']}/readyz") == (503, "draining\n"), 60, "the run to drain")
    eventually(lambda: probe(f"{urls['label-0']}/readyz") == (503, "draining\n"), 60, "the labeler to drain")
    (run.directory / "labels").touch()
    assert running.wait(300) == 0, run.log_of(running)
    book = book_of(run)
    assert book["balanced"]
    unlabelled = book["unlabelled"]
    assert isinstance(unlabelled, dict)
    assert unlabelled["labeled"] > 0


@pytest.mark.long  # JAX compiles for a minute
def test_every_process_of_a_run_serves_its_catalogued_metrics_and_drains_without_loss(
    broker: str, run_name: str, compiled: Path, tmp_path: Path
) -> None:
    base, port = free_port_row("127.0.0.1", 12), free_port("127.0.0.1")
    vllm = VllmStandIn()
    with serving_http(vllm.answer) as url, (tmp_path / "log").open("w") as log:
        settings = (
            *(f"data_dir={tmp_path}", f"service.port={base}", f"gateway.port={port}", "evaluation.every_versions=1"),
            *(f"serving.urls={json.dumps([url.removesuffix('/v1')])}", "learner.max_steps=100000", *SMALL),
        )
        running = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "rollstream", "run", "--run", run_name),
                *(f"--set={setting}" for setting in settings),
            ],
            env={**os.environ, "JAX_COMPILATION_CACHE_DIR": str(compiled), "KAFKA_BOOTSTRAP_SERVERS": broker},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            listed = tmp_path / "runs" / run_name / "targets.json"
            names = (
                "supervisor",
                "learn",
                "infer",
                "serve-weights",
                "group-0",
                "group-1",
                "env-0",
                "env-1",
                "gateway",
                "eval",
            )
            eventually(
                lambda: len(json.loads(listed.read_text())) == len(names) or running.poll() is not None,
                900,
                "the processes",
            )
            assert running.poll() is None, (tmp_path / "log").read_text()[-3000:]
            urls = {e["labels"]["__meta_process"]: f"http://{e['targets'][0]}" for e in json.loads(listed.read_text())}
            assert set(urls) == set(names)
            learner = urls["learn"]
            eventually(lambda: scrape(learner)[0]["rollstream_learner_step"][()] >= 3, 900, "three steps")
            seen = {}
            for name, place in urls.items():
                role = "run" if name == "supervisor" else name if name == "serve-weights" else name.partition("-")[0]
                eventually(lambda place=place: probe(f"{place}/readyz")[0] == 200, 300, f"{name} to be ready")
                eventually(
                    lambda place=place, role=role: not lacking(scrape(place)[0], role), 300, f"all metrics of {name}"
                )
                seen[name], labels = scrape(place)
                assert seen[name]["rollstream_uncatalogued_metrics"] == {(): 0.0}, name
                assert {run for run, _process in labels} == {run_name}
                assert probe(f"{place}/livez") == (200, "ok\n")
            served = {series for of_process in seen.values() for series in of_process}
            shown = shown_always("run", "learn", "infer", "serve-weights", "group", "env", "gateway")
            assert shown - served == set()
            stages = {dict(labels)["stage"] for labels in seen["learn"]["rollstream_learner_stage_seconds"]}
            assert {"step", "wait_for_batch", "load", "snapshot"} <= stages
            groupers = [urls["group-0"], urls["group-1"]]
            # A grouping process counts what it has committed at each interval of its metrics.
            eventually(lambda: sum(map(batched, groupers)) >= 3 * 32, 60, "the batches of three steps to be counted")
            eventually(
                lambda: any("batched" in fates(url) for url in groupers), 60, "rollouts to be counted as batched"
            )
            assert seen["infer"]["rollstream_inference_version_timestamp_seconds"][()] > 1.7e9
            own = [
                line for line in probe(f"http://127.0.0.1:{port}/metrics")[1].splitlines() if "open_sessions" in line
            ]
            assert own[-1] == "rollstream_gateway_open_sessions 0.0"
            running.terminate()
            eventually(lambda: probe(f"{urls['supervisor']}/readyz") == (503, "draining\n"), 60, "the run to drain")
            assert running.wait(300) == 0, (tmp_path / "log").read_text()[-3000:]
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)
                running.wait()
    killed = [line for line in (tmp_path / "log").read_text().splitlines() if '"role_killed"' in line]
    assert killed == []
    book = ledger(KafkaConfig(bootstrap_servers=broker), run_name)
    assert book.balanced, book.problems


def batched(url: str) -> float:
    """The number of rollouts whose time into a batch a grouping process has observed."""
    return scrape(url)[0]["rollstream_grouping_rollout_to_batch_seconds_count"][()]


def fates(url: str) -> set[str]:
    """Fates of rollouts that a grouping process counts."""
    return {dict(labels)["fate"] for labels in scrape(url)[0].get("rollstream_grouping_rollouts_total", {})}


def shown_always(*roles: str) -> set[str]:
    """Series in the dashboard and the alert rules that these roles serve at all times."""
    shown = {
        name
        for text in (*dashboard.expressions(), *alerts.expressions())
        for name in re.findall(r"rollstream_\w+", text)
    }
    always = {spec.name for role in roles for spec in of_role(role) if not spec.when}
    return {name for name in shown if name in always or name.removesuffix("_bucket") in always}


def pid_of(run: RealRun, name: str) -> int:
    """Process id of a role of the run that was started last."""
    lines = [json.loads(line) for line in run.log_of(run.processes[-1]).splitlines() if line.startswith("{")]
    started = [line for line in lines if (line["event"], line.get("role")) == ("role_started", name)]
    return int(started[-1]["pid"])
