"""A run every topic of which is flooded by seed, with records that are garbage, damaged, or well encoded and senseless:
each command that reads a log answers or says in one line why not, and every reader goes on to the end.

`FLOOD_TOPIC_RECORDS` is the number in each topic in the long form.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rollstream.consumers.batch_reader import IndexReader
from rollstream.consumers.buffers.slices.buffer import EpisodeSliceBuffer
from rollstream.consumers.buffers.trajectories.buffer import TrajectoryReplayBuffer
from rollstream.consumers.buffers.trajectories.filler import TrajectoryFiller
from rollstream.consumers.learner.input.followed_topics import Exclusions
from rollstream.consumers.weights.follower import WeightsFollower
from rollstream.consumers.weights.step_log import read_steps
from rollstream.pipeline.run.observer import RunObserver
from rollstream.pipeline.ui.server.session_list import read_sessions
from rollstream.producers.flow.policy_versions import PolicyFollower
from rollstream.producers.flow.tailers import JournalTailer
from rollstream.topics.config import KafkaConfig
from rollstream.topics.control.steering import desired_state
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.sender import Sender
from rollstream.topics.wire.catalogue import CATALOGUE, spec_of
from tests.faults.test_flood import peak_mib
from tests.model.test_hostile_topics import strict
from tests.support import planted
from tests.support.hostile_input import HostileInput
from tests.support.runs import RealRun
from tests.support.waiting import eventually

SEED = int(os.environ.get("FLOOD_SEED", "1"))
RECORDS = int(os.environ.get("FLOOD_TOPIC_RECORDS", "5000"))
MOST_MIB = 700
"""Most memory of a command; one that reads a run keeps what it shows of it, and `archive` the records of its files."""
JUDGE = "def judge(rollout):\n    return 1.0 - rollout.reward\n"
COMMANDS = (
    "ledger",
    "ledger --by env",
    "verify",
    "top --once",
    "runs",
    "lineage --batch 0-0",
    "lineage --rollout good0-0",
    "lineage --step 1",
    "lineage --policy 6",
    "show good0-0",
    "replay",
    "replay --set grouping.estimator=grpo",
    "dlq ls",
    "dlq redrive --dry-run",
    "prune --dry-run --keep-batches 0",
    "exclude --env env --dry-run",
    "groups --batches",
    "weights ls",
    "weights verify",
    "topics describe",
    "scale",
    "stop",
    "environment show",
    "rescore --verifier judge.py:judge",
    "archive",
    "archive --check",
)


FEW = 200
LONG = pytest.mark.parametrize("run", [pytest.param(RECORDS, marks=pytest.mark.long)], indirect=True)
BOTH = pytest.mark.parametrize("run", [FEW, pytest.param(RECORDS, marks=pytest.mark.long)], indirect=True)


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest, broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRun]:
    """A run with planted facts, flooded once it was grouped."""
    name = f"flooded{request.param}"
    real = RealRun(KafkaConfig(bootstrap_servers=broker), name, tmp_path_factory.mktemp(name))
    try:
        planted.plant(real)
        (real.directory / "judge.py").write_text(JUDGE)
        for spec in CATALOGUE:
            flood(real, spec.name, request.param)
        yield real
    finally:
        real.stop()


def flood(run: RealRun, topic: str, records: int) -> None:
    """Write hostile records of a seed into partition 0 of a topic."""
    hostile, spec = HostileInput(SEED), spec_of(topic)
    before = topic_admin.bounds(run.kafka, run.topic(topic))[0][1]
    with Sender(clients.producer(run.kafka)) as sender:
        for number in range(records):
            key = hostile.key("env", "x")
            # Compacted topics take no record without a key, and would lose records with equal keys.
            key = f"{number}".encode() if spec.cleanup == "compact" else key
            sender.send(run.topic(topic), hostile.value(spec.values), key, partition=0)
        sender.flush(120)
    assert topic_admin.bounds(run.kafka, run.topic(topic))[0][1] - before == records


def said(run: RealRun, *words: str) -> tuple["subprocess.CompletedProcess[str]", float]:
    """Run a command as a process; return its answer and its peak memory in MiB."""
    out, err = run.directory / "out", run.directory / "err"
    with out.open("wb") as output, err.open("wb") as errors:
        process = subprocess.Popen(
            run.command(*words), cwd=run.directory, env=run.environment(), stdout=output, stderr=errors
        )
        peak = 0.0

        def ended() -> bool:
            nonlocal peak
            code = process.poll()
            if code is None:
                peak = max(peak, peak_mib(process.pid))
            return code is not None

        try:
            eventually(ended, 300, " ".join(words), every_s=0.05)
        finally:
            process.kill()
            process.wait()
    texts = out.read_text(errors="replace"), err.read_text(errors="replace")
    return subprocess.CompletedProcess(words, process.returncode, *texts), peak


def places(run: RealRun, topic: str) -> set[tuple[int, int]]:
    """Partitions and offsets of the records of a topic."""
    return {(message.partition, message.offset) for message in read_to_end(run.kafka, run.topic(topic))}


@LONG
def test_every_command_answers_or_says_in_one_line_why_not(run: RealRun, capsys: pytest.CaptureFixture[str]) -> None:
    codes, most = {}, 0.0
    for command in (*COMMANDS, *(f"cat {spec.name}" for spec in CATALOGUE)):
        words = command.split()
        answer, peak = said(run, *words, *(("--json",) if words[0] != "archive" else ()))
        most = max(most, peak)
        assert answer.returncode in (0, 1, 2), f"{command}: {answer.returncode} {answer.stderr[-2000:]}"
        assert "Traceback" not in answer.stderr, f"{command}: {answer.stderr[-3000:]}"
        codes[command] = answer.returncode
        if answer.returncode == 2:
            lines = [line for line in answer.stderr.splitlines() if line.startswith("rollstream: ")]
            assert len(lines) == 1, f"{command}: {answer.stderr[-2000:]}"
            assert not answer.stdout, f"{command}: {answer.stderr[-2000:]} after {answer.stdout[:500]}"
        elif words[0] == "cat":
            shown = [strict(line) for line in answer.stdout.splitlines()]
            assert {(line["partition"], line["offset"]) for line in shown} == places(run, words[1])
        elif words[0] != "archive":
            strict(answer.stdout)
    with capsys.disabled():
        refused = sorted(command for command, code in codes.items() if code == 2)
        print(f"\n{len(codes)} commands, at most {most:.0f} MiB, refused in one line: {refused}", end=" ")
    assert most < MOST_MIB


@LONG
def test_a_report_is_written(run: RealRun) -> None:
    answer, _peak = said(run, "report", "-o", "report.html")
    assert answer.returncode == 0, answer.stderr[-2000:]
    assert (run.directory / "report.html").stat().st_size > 1000


@BOTH
@pytest.mark.long
def test_every_follower_of_the_run_reads_to_the_end(run: RealRun, tmp_path: Path) -> None:
    kafka, name = run.kafka, run.name
    with JournalTailer(kafka, name) as tailer:
        assert tailer.progress.skipped > 0
    with closing(RunObserver(kafka, name)) as observer:
        observer.catch_up()
        assert observer.skipped.total > 0
        assert observer.snapshot(10).rollouts > 0
    with PolicyFollower(kafka, name) as policies:
        assert eventually(lambda: policies.read().steps, 60, "manifests")
    with WeightsFollower(kafka, name) as follower:
        eventually(lambda: follower.skipped.total, 60, "the follower to pass over")
        follower.get_state(-1)
    with IndexReader(kafka, name) as index:
        eventually(lambda: index.poll(0.1) is None and index.at_end, 60, "the index to its end")
        assert index.skipped.total > 0
    with Exclusions(kafka, name) as exclusions:
        assert exclusions.reason("nothing of this name") == ""
    # Junk may happen to be a sound request or step, so nothing is counted; both must read past it.
    desired_state(kafka, name)
    read_steps(kafka, name, "main")
    assert read_sessions(kafka, name)
    whole = TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "trajectories", max_trajectories=50)
    slices = EpisodeSliceBuffer(tmp_path / "slices", 500, 2)
    with whole, slices:
        filler = TrajectoryFiller(kafka, name, [whole, slices])
        with closing(filler):
            filler.fill(60.0)
        end = topic_admin.bounds(kafka, run.topic("trajectories"))[0][1]
        assert whole.position[0] == slices.position[0] == end
        assert sum(filler.counts) == end, "each record was added or refused"
