"""`python -m tests.bench.soak`: the memory of every role of a run that goes on for a while; exit code 1 if one grows.

The run is a real `rollstream run` of the demo's task with a gateway and its page; an archiver and an agent that plays
sessions run with it. Settings bound what roles remember, so tightly that they reach the bounds before half time. Memory
is flat if the line through the second half of its samples rises by no more than `LIMIT_BYTES`, or `LIMIT_SHARE` of its
mean where that is more.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil

from rollstream.consumers.archive.writer import GROWN_BYTES
from rollstream.infra.broker.broker import LocalBroker
from rollstream.infra.broker.ports import free_port
from rollstream.pipeline.command_line.text_tables import table
from tests.support.gateways import post
from tests.support.paths import ROOT
from tests.support.steered_run import VALUES, SteeredRun

ROLES = ("overseer", "group", "learn", "infer", "env", "gateway", "archive", "page", "page index")
LIMIT_BYTES, LIMIT_SHARE = 8 * 2**20, 0.03
_SMALL = {
    "grouping.remembered_bytes": 2**20,
    "gateway.remembered_sessions": 200,
    "ui.index_cache_bytes": 8 * 2**20,
}
_SECONDS = {"quick": 60.0, "full": 600.0}
_MOST_SAMPLES = 600
_GROUP = 4
_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class RoleMemory:
    """Resident memory of the processes of a role, without pages of files."""

    role: str
    seconds: tuple[float, ...]
    """Time of each sample since the first."""
    sizes_bytes: tuple[int, ...]

    @property
    def growth_bytes(self) -> float:
        """Rise of the line of least squares over the second half."""
        half = len(self.seconds) // 2
        times, sizes = np.array(self.seconds[half:]), np.array(self.sizes_bytes[half:], np.float64)
        slope = np.polynomial.Polynomial.fit(times, sizes, 1).convert().coef[1:]
        return float(slope.sum() * (times[-1] - times[0]))

    @property
    def limit_bytes(self) -> float:
        """The largest growth that counts as flat."""
        half = len(self.sizes_bytes) // 2
        if (
            self.role == "archive"
        ):  # Between two times that it returns freed memory to the system it may grow by so much.
            return GROWN_BYTES
        return max(LIMIT_BYTES, LIMIT_SHARE * float(np.mean(self.sizes_bytes[half:])))

    @property
    def is_flat(self) -> bool:
        """Whether the memory grows by no more than the limit."""
        return self.growth_bytes <= self.limit_bytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, watch and print; exit code 1 if the memory of a role grows."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.soak", description="Watch the memory of every role.")
    parser.add_argument("--full", action="store_true", help="run for ten minutes instead of one")
    parser.add_argument("--seconds", type=float, metavar="S", help="for so long")
    parser.add_argument("--json", action="store_true", help="print JSON, with every sample")
    args = parser.parse_args(arguments)
    seconds = args.seconds or _SECONDS["full" if args.full else "quick"]
    with tempfile.TemporaryDirectory(prefix="rollstream-soak-") as folder:
        # Never use KAFKA_BOOTSTRAP_SERVERS: this broker has no other load.
        broker = LocalBroker.start(Path(folder) / "broker", bound_to_parent=True)
        try:
            with redirect_stdout(sys.stderr):  # keeps what the run prints out of stdout
                roles, done = soaked(broker.bootstrap_servers, Path(folder), seconds)
        finally:
            broker.stop()
    if args.json:
        print(json.dumps({"done": done, "roles": [asdict(role) | {"flat": role.is_flat} for role in roles]}))
    else:
        print(report(roles, done))
    return 0 if all(role.is_flat for role in roles) else 1


def soaked(broker: str, folder: Path, seconds: float) -> tuple[list[RoleMemory], dict[str, int]]:
    """Memory of each role over so many seconds, and what the run did meanwhile.

    Raises RuntimeError if a process ended: its successor would begin with little memory.
    """
    ports = {"gateway.port": free_port("127.0.0.1"), "ui.port": free_port("127.0.0.1")}
    run = SteeredRun(broker, "soak", folder, values=VALUES | _SMALL | ports)
    url = f"http://127.0.0.1:{ports['gateway.port']}"
    try:
        run.start()
        with _archiver(run) as archiver, _agent(url) as sessions:
            roles = _sampled(_processes(run, archiver), seconds)
            if not sessions[0]:
                raise RuntimeError("the agent played no session: the gateway had nothing to do")
            top = run.top()
            done = {"steps": top["step"], "rollouts": top["rollouts"], "sessions": sessions[0]}
        run.stop()
        return roles, done
    finally:
        run.close()


def _processes(run: SteeredRun, archiver: psutil.Process) -> dict[str, list[psutil.Process]]:
    processes = {role: [psutil.Process(pid) for pid in run.pids(role)] for role in ("group", "learn", "infer", "env")}
    processes["gateway"] = [psutil.Process(pid) for pid in run.pids("gateway")]
    processes["page"] = [psutil.Process(pid) for pid in run.pids("ui")]
    processes["page index"] = [child for page in processes["page"] for child in page.children(recursive=True)]
    return processes | {"archive": [archiver], "overseer": [psutil.Process(run.process.pid)]}


def _sampled(processes: Mapping[str, Sequence[psutil.Process]], seconds: float) -> list[RoleMemory]:
    if missing := [role for role in ROLES if not processes[role]]:
        raise RuntimeError(f"no process of {', '.join(missing)}")
    times: list[float] = []
    sizes: dict[str, list[int]] = {role: [] for role in ROLES}
    began = time.monotonic()
    while (now := time.monotonic() - began) < seconds or len(times) < 4:
        times.append(now)
        for role in ROLES:
            try:
                sizes[role].append(sum(map(own_bytes, processes[role])))
            except psutil.NoSuchProcess as gone:
                raise RuntimeError(f"a process of {role} ended after {now:.0f} s") from gone
        time.sleep(max(0.2, seconds / _MOST_SAMPLES))
    return [RoleMemory(role=role, seconds=tuple(times), sizes_bytes=tuple(sizes[role])) for role in ROLES]


def own_bytes(process: psutil.Process) -> int:
    """Resident memory without pages of files: the page maps its index, and the system can take such pages back."""
    memory = process.memory_info()
    return int(memory.rss - getattr(memory, "shared", 0))


@contextmanager
def _archiver(run: SteeredRun) -> Iterator[psutil.Process]:
    """The process of `rollstream archive --follow` for a run."""
    words = ["archive", str(run.directory / "archive"), "--follow", "--every", "1", "--run", run.name]
    words += ["-b", run.kafka.bootstrap_servers]
    with (run.directory / "archive.out").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rollstream", *words], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def _agent(url: str) -> Iterator[list[int]]:
    """An agent that plays groups of sessions in a thread, one call each; yields a list of their number so far."""
    played, stop = [0], threading.Event()

    def play() -> None:
        while not stop.is_set():
            status, group, _headers = post(f"{url}/rl/start_session", {"task_id": "sort", "group_size": _GROUP})
            if status not in (200, 201):
                stop.wait(0.5)  # The capacity rule holds it back.
                continue
            for number, session in enumerate(group["sessions"]):
                post(f"{session['base_url']}/completions", {"model": "policy", "prompt": "312>", "max_tokens": 4})
                about = {"session_id": session["session_id"]}
                post(f"{url}/rl/set_reward", about | {"reward": number % 2})
                played[0] += post(f"{url}/rl/end_session", about)[0] == 200

    thread = threading.Thread(target=play, name="soak-agent")
    thread.start()
    try:
        yield played
    finally:
        stop.set()
        thread.join()


def report(roles: Sequence[RoleMemory], done: Mapping[str, int]) -> str:
    """The roles as a table, and what the run did."""

    def size(value: float) -> str:
        return f"{value / _MIB:,.1f}"

    rows = [
        (
            role.role,
            size(role.sizes_bytes[0]),
            size(role.sizes_bytes[len(role.sizes_bytes) // 2]),
            size(role.sizes_bytes[-1]),
            size(role.growth_bytes),
            size(role.limit_bytes),
            "yes" if role.is_flat else "NO",
        )
        for role in roles
    ]
    columns = ("role", "MiB at first", "half way", "at last", "rise of 2nd half", "limit", "flat")
    what = ", ".join(f"{count:,} {name}" for name, count in done.items())
    return f"{table(columns, rows)}\n\nin {roles[0].seconds[-1]:.0f} s: {what}"


if __name__ == "__main__":
    sys.exit(main())
