"""Commands and snippets of the documentation, run as they stand against a real broker.

A block below `<!-- run: with a broker -->` runs with its address in the environment and a prepared run under the name
the page uses; one below `<!-- run: alone -->` starts what it needs itself. The tutorial's are
carried out in turn.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from docs.build import pages
from rollstream.infra.broker.broker import LocalBroker
from tests.support.pages import blocks, page
from tests.support.paths import ROOT
from tests.support.runs import RealRun, rollout
from tests.support.settled import settled

_RUNNABLE = re.compile(r"^<!-- run: ([a-z ]+) -->\n```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [
    (path.stem, kind, language, body)
    for path in pages()
    for kind, language, body in _RUNNABLE.findall(path.read_text(encoding="utf-8"))
]
COMMANDS = {kind: body for _, kind, language, body in BLOCKS if language == "sh"}


def run_lines(body: str, directory: Path, **variables: str) -> list[str]:
    """Run the commands of a block one after the other in a directory; each must exit with 0. Returns their output."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ROLLSTREAM", "KAFKA_BOOTSTRAP"))}
    outputs = []
    for line in body.replace("\\\n", "").splitlines():
        program, *words = shlex.split(line)
        assert program == "rollstream", line
        done = subprocess.run(
            [sys.executable, "-P", "-m", "rollstream", *words],
            cwd=directory,
            env={**environment, "PYTHONPATH": str(ROOT), **variables},
            capture_output=True,
            text=True,
            timeout=800,
            check=False,
        )
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        outputs.append(done.stdout)
    return outputs


def test_the_commands_that_ask_a_run_work_as_documented(real_run: RealRun) -> None:
    real_run.prepare()
    real_run.start("group")
    real_run.send(rollout(f"x{example}", member) for example in range(8) for member in range(4))
    settled(real_run, batched=32)
    body = COMMANDS["with a broker"].replace("--run main", f"--run {real_run.name}")
    assert body.count(real_run.name) == len(body.splitlines()), "every line names the run"
    outputs = run_lines(
        body,
        real_run.directory,
        KAFKA_BOOTSTRAP_SERVERS=real_run.kafka.bootstrap_servers,
        ROLLSTREAM_TOPICS__PARTITIONS=str(real_run.topics.partitions),
    )
    assert all(output.strip() for output in outputs)
    assert any("every record is in exactly one place" in output for output in outputs)
    assert any("0 differences" in output for output in outputs)


def test_a_local_broker_starts_answers_and_stops_as_documented(tmp_path: Path) -> None:
    try:
        started, status, stopped = run_lines(COMMANDS["alone"], tmp_path)
    finally:
        left = LocalBroker.find(tmp_path / ".rollstream" / "try")
        if left is not None:
            left.stop()
    assert left is None
    assert "Kafka is ready at" in started
    assert "answers" in status
    assert "stopped" in stopped


def test_trajectories_are_collected_and_drawn_as_documented(
    real_run: RealRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollstream.topics.kafka import provisioning

    provisioning.apply(real_run.kafka, real_run.topics, real_run.name)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for body in [body for name, _kind, language, body in BLOCKS if (name, language) == ("control", "python")]:
        snippet = body.replace("127.0.0.1:9092", real_run.kafka.bootstrap_servers).replace(
            '"main"', repr(real_run.name)
        )
        exec(compile(snippet, "docs/control.md", "exec"), names)
    assert len(names["buffer"]) == 5, "400 steps are five trajectories of 80"
    assert names["batch"]["curr_obs"]["state"].shape == (256, 4)


@pytest.mark.long  # It starts every role of a run, which compile their programs.
def test_the_tutorial_leads_from_a_task_to_a_curve_a_bad_rollout_and_an_export(real_run: RealRun) -> None:
    for name, language in (("digits.py", "python"), ("run.toml", "toml")):
        [body] = blocks(page("tutorial"), language)
        (real_run.directory / name).write_text(body, encoding="utf-8")
    outputs: dict[str, str] = {}
    for line in "".join(body for _, kind, _, body in BLOCKS if kind == "tutorial").replace("\\\n", "").splitlines():
        command = line.split()[1]
        if command != "broker":
            [outputs[command]] = run_lines(
                line.replace("UID", outputs.get("sql", "").split("uid")[-1].strip() or "UID"),
                real_run.directory,
                KAFKA_BOOTSTRAP_SERVERS=real_run.kafka.bootstrap_servers,
                ROLLSTREAM_RUN=real_run.name,
                ROLLSTREAM_LEARNER__MAX_STEPS="4",
            )
    assert "reward" in outputs["top"]
    assert "every record is in exactly one place" in outputs["ledger"]
    assert "0 differences" in outputs["verify"]
    uid = outputs["sql"].split()[-1]
    assert f"rollout {uid}" in outputs["show"]
    assert f"rollout {uid}" in outputs["lineage"]
    assert list((real_run.directory / "exported").glob("**/*.parquet"))
    assert (real_run.directory / "model" / "model.safetensors").is_file()

    # The notebooks look into the tutorial's run.
    archive, rescored = (results_of(name, real_run) for name in ("archive", "rescore"))
    assert "policy_version" in archive
    assert "batched" in archive
    assert "largest_difference" in rescored
    assert "last clean step and version:" in rescored


def results_of(name: str, run: RealRun) -> str:
    """Run a notebook in the run's directory as its readers do; return what its cells print and show."""
    import nbformat
    from nbclient import NotebookClient

    file = ROOT / "docs" / "notebooks" / f"{name}.ipynb"
    notebook = nbformat.read(file, as_version=4)
    assert len(notebook.cells) < 12
    assert not any(cell.get("outputs") for cell in notebook.cells), "no output is committed"
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "KAFKA_BOOTSTRAP_SERVERS": run.kafka.bootstrap_servers,
        "ROLLSTREAM_RUN": run.name,
    }
    client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(run.directory)}})
    client.execute(env=environment)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "\n".join(output.get("text", "") or output["data"].get("text/plain", "") for output in outputs)


def test_every_block_marked_to_run_is_run_by_one_of_these_tests() -> None:
    assert sorted((name, kind, language) for name, kind, language, _body in BLOCKS) == [
        ("commands", "alone", "sh"),
        ("commands", "with a broker", "sh"),
        ("commands", "with a broker", "sh"),
        ("control", "with a broker", "python"),
        ("control", "with a broker", "python"),
        *[("tutorial", "tutorial", "sh")] * 5,
    ]
