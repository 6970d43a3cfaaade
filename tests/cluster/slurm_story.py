"""The story of a run as a job of Slurm with two nodes on this machine, told to stdout: requeued, cancelled, resumed.

Two nodes, because the parts of a heterogeneous job are placed on different ones. In the end the job is
drained, and the independent auditor judges its log.
"""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.broker.test_demo import SMALL
from tests.cluster import namespaces
from tests.cluster.namespaces import give_address
from tests.cluster.steps import last_step
from tests.faults.auditor import audit
from tests.support.debian import install_program
from tests.support.paths import ROOT
from tests.support.waiting import eventually

PROGRAMS = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client"}
RUN, PORT = "main", 9092
_PATIENCE_S = 1800.0
_CONF = """\
ClusterName=tests
SlurmctldHost={host}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=5,bf_hetjob_immediate,sched_interval=5
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=20
MinJobAge=3600
SlurmdParameters=config_overrides
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
StateSaveLocation={folder}/state
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
NodeName=n[1-2] NodeHostname={host} Port=[26821-26822] CPUs=8 RealMemory=30000 State=UNKNOWN
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    """What this machine lacks of Slurm, after apt has been asked for it."""
    return namespaces.missing() or [
        problem for program, package in PROGRAMS.items() if (problem := install_program(program, package))
    ]


class Slurm:
    """Daemons of Slurm in the namespaces of this process, and a user with a run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._began = folder, time.monotonic()
        self.servers = f"{socket.gethostname()}:{PORT}"
        programs = folder / "bin"
        programs.mkdir()
        (programs / "rollstream").write_text(f'#!/bin/sh\nexec {sys.executable} -P -m rollstream "$@"\n')
        (programs / "rollstream").chmod(0o755)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("ROLLSTREAM", "KAFKA_"))}
        path = f"{programs}:/usr/sbin:{os.environ['PATH']}"
        self.environment = {
            **kept,
            "PATH": path,
            "SLURM_CONF": f"{folder}/slurm.conf",
            "JAX_COMPILATION_CACHE_DIR": f"{folder}/jax",
        }
        give_address()
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o400)
        (folder / "state").mkdir()
        (folder / "slurm.conf").write_text(_CONF.format(host=socket.gethostname(), folder=folder))
        files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log"}
        # Its directory belongs to root alone, which munged calls insecure.
        self.run("munged", "--force", *(f"--{flag}={folder / name}" for flag, name in files.items()))
        self.run("slurmctld")
        for node in ("n1", "n2"):
            (folder / f"spool-{node}").mkdir()
            self.run("slurmd", "-N", node)
        eventually(lambda: self.run("sinfo", "-h", "-o", "%t %D") == "idle 2", 300, "two idle nodes", every_s=0.5)
        self.say("Slurm has two idle nodes")

    def run(self, *words: str) -> str:
        """Output of a command, which must succeed."""
        answer = subprocess.run(
            words,
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=1800,
        )
        assert answer.returncode == 0, f"{words}: {answer.stdout[-2000:]}{answer.stderr[-4000:]}"
        return answer.stdout.strip()

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:6.0f} s] {text}", flush=True)

    def submit(self) -> str:
        """Submit the job; return its number."""
        return self.run("sbatch", "--parsable", "run.sbatch")

    def state(self, job: str) -> str:
        return self.run("squeue", "-h", "-j", job, "-t", "all", "-o", "%T").splitlines()[0]

    def await_steps(self, job: str, before: int) -> int:
        """Wait until some steps more than `before` are trained, while the job lasts; return the last."""
        step = before + 6

        def reached() -> bool:
            return last_step(self.servers, RUN) >= step or self.state(job) not in ("PENDING", "RUNNING")

        eventually(reached, _PATIENCE_S, f"step {step} of job {job}", every_s=1.0)
        assert self.state(job) == "RUNNING", f"{self.state(job)}: {self.log(job)}"
        reached_step = last_step(self.servers, RUN)
        self.say(f"job {job} has trained step {reached_step}")
        return reached_step

    def log(self, job: str) -> str:
        return (self.folder / f"rollstream-{RUN}-{job}.log").read_text(errors="replace")[-4000:]


def main(folder: Path) -> None:
    slurm = Slurm(folder)
    text = (ROOT / "recipes" / "dsort3" / "run.toml").read_text().replace('run = "demo"', f'run = "{RUN}"')
    (folder / "run.toml").write_text(text)
    parts = ("--broker-options=--cpus-per-task=1 --mem=2G", "--roles-options=--cpus-per-task=2 --mem=4G")
    small = (*SMALL, "--set=learner.max_steps=1000000")
    slurm.run("rollstream", "deploy", "slurm", "run.toml", "-o", "run.sbatch", *parts, *small)
    job = slurm.submit()
    step = slurm.await_steps(job, 0)
    slurm.run("scontrol", "requeue", job)
    slurm.say(f"scontrol requeue {job}")
    eventually(lambda: slurm.state(job) == "PENDING", _PATIENCE_S, "the job waits again", every_s=0.2)
    eventually(lambda: slurm.state(job) == "RUNNING", _PATIENCE_S, "the job runs again", every_s=0.2)
    step = slurm.await_steps(job, step)
    slurm.run("scancel", job)
    eventually(lambda: slurm.state(job) == "CANCELLED", _PATIENCE_S, "the job to be cancelled", every_s=0.2)
    # Its processes have up to KillWait to end.
    eventually(lambda: slurm.run("sinfo", "-h", "-o", "%t %D") == "idle 2", _PATIENCE_S, "free nodes", every_s=0.5)
    slurm.say(f"scancel {job}")
    job = slurm.submit()
    step = slurm.await_steps(job, step)
    slurm.run("rollstream", "steer", "stop", "--drain", "--run", RUN, "-b", slurm.servers)
    eventually(lambda: slurm.state(job) not in ("PENDING", "RUNNING"), 2 * _PATIENCE_S, "the job to end", every_s=1.0)
    assert slurm.state(job) in ("COMPLETED", "COMPLETING"), slurm.log(job)
    slurm.say(f"job {job} ended by itself")
    data = ".rollstream/demo/broker"
    slurm.run("rollstream", "broker", "start", "--data", data, "--port", str(PORT))
    flags = ("--run", RUN, "-b", f"127.0.0.1:{PORT}")
    account = json.loads(slurm.run("rollstream", "ledger", "--json", *flags))
    slurm.say(f"ledger: {account['produced']} records, balanced: {account['balanced']}, unread: {account['unread']}")
    assert account["balanced"]
    slurm.say(slurm.run("rollstream", "verify", *flags).splitlines()[-1])
    judged = audit(f"127.0.0.1:{PORT}", RUN)
    slurm.say(f"the auditor: {judged.produced} records, {judged.batches} batches, findings {judged.findings}")
    assert not judged.findings
    assert last_step(f"127.0.0.1:{PORT}", RUN) >= step
    slurm.run("rollstream", "broker", "stop", "--data", data)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
