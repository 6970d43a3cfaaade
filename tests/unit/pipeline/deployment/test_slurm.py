"""The batch script of a run: Slurm and bash read it, and its parts have their options, settings and commands."""

import subprocess
from pathlib import Path

import pytest

from tests.support.command_line import answer_of


def rendered(folder: Path, *flags: str, text: str = "") -> str:
    """The script that the command writes."""
    (folder / "run.toml").write_text(f'run = "main"\ndata_dir = "{folder / "data"}"\n{text}')
    answer = answer_of(folder, "deploy", "slurm", str(folder / "run.toml"), *flags)
    assert answer.returncode == 0, answer.stderr
    checked = subprocess.run(["bash", "-n"], input=answer.stdout, text=True, capture_output=True)
    assert checked.stderr == ""
    return answer.stdout


def test_the_broker_and_the_roles_are_parts_of_one_job_with_options_of_their_own(tmp_path: Path) -> None:
    roles = "--gpus=8 --comment='two words'"
    script = rendered(tmp_path, "--broker-options=--partition=cpu", f"--roles-options={roles}", "--port", "9999")
    broker, of_roles = script.split("#SBATCH hetjob\n")
    assert script.startswith("#!/bin/bash\n")
    named = "#SBATCH --job-name=rollstream-main --output=rollstream-main-%j.log --open-mode=append --requeue\n"
    assert broker.endswith(f"{named}#SBATCH --nodes=1 --ntasks=1 --partition=cpu\n")
    assert of_roles.startswith("#SBATCH --nodes=1 --ntasks=1 --gpus=8 --comment='two words'\nset -eu\n")
    data = tmp_path / "data" / "broker"
    lines = of_roles.splitlines()
    assert f'rollstream broker start --data {data} --host "$(hostname)" --port 9999' in lines
    assert f"trap 'rollstream broker stop --data {data}' EXIT" in lines
    assert lines[-3:] == [
        'export KAFKA_BOOTSTRAP_SERVERS="$(hostname):9999"',
        f"srun --het-group=1 rollstream run {tmp_path / 'run.toml'} &",
        "wait $!",
    ]


def test_with_brokers_of_its_own_a_run_is_one_part_without_a_broker(tmp_path: Path) -> None:
    script = rendered(tmp_path, "--brokers", "0", "-b", "kafka.example:9092", "--set", "learner.max_steps=3")
    assert "hetjob" not in script
    assert "rollstream broker" not in script
    assert "--cpus-per-task=8 --mem=32G --gpus=1\n" in script
    assert "export ROLLSTREAM_LEARNER__MAX_STEPS=3\n" in script
    assert "kafka.example:9092" in script
    assert script.endswith(f"srun rollstream run {tmp_path / 'run.toml'} &\nwait $!\n")


@pytest.mark.parametrize(
    ("text", "flags", "fault"),
    [
        ("topics.replication_factor = 3", (), "topics.replication_factor is 3, but the job has one broker"),
        ('kafka.client."security.protocol" = "SSL"', (), "the broker of the job is plaintext"),
        ("", ("--brokers", "0"), "kafka.bootstrap_servers has 127.0.0.1:9092"),
    ],
)
def test_what_a_job_cannot_run_is_refused_with_the_remedy(
    tmp_path: Path, text: str, flags: tuple[str, ...], fault: str
) -> None:
    (tmp_path / "run.toml").write_text(text)
    answer = answer_of(tmp_path, "deploy", "slurm", str(tmp_path / "run.toml"), *flags)
    assert (answer.returncode, fault in answer.stderr) == (2, True), answer.stderr
