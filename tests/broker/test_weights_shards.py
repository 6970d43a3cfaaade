"""Several processes publish one version, each its own tensors: a follower has all of it or the version before."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream.consumers.weights.follower import WeightsFollower
from rollstream.consumers.weights.manifests import read_manifests
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.wire.keys import decode_key
from rollstream.topics.wire.params_digest import params_digest
from tests.support.paths import ROOT
from tests.support.runs import RealRun
from tests.support.weights_child import params_of

LONG_S, SHORT_S = 300.0, 8.0
Child = subprocess.Popen[str]


class Team:
    """Processes of one learner, started together on a channel of their own."""

    def __init__(self, run: RealRun, url: str) -> None:
        self.run, self.url, self.number = run, url, 0
        self.children: list[Child] = []

    def start(
        self, processes: int, last: int, moments: dict[int, str] | None = None, timeout_s: float = LONG_S
    ) -> None:
        """Publish up to version `last`; a process dies at its moment of tests/support/shard_child.py."""
        self.stop()
        self.number += 1
        directory = self.run.directory / f"channel-{self.number}"
        directory.mkdir()
        for process in range(processes):
            words = [self.run.kafka.bootstrap_servers, self.run.name, f"{process}/{processes}", str(directory)]
            words += [str(last), (moments or {}).get(process, ""), str(timeout_s), self.url]
            command = [sys.executable, "-m", "tests.support.shard_child", *words]
            child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            self.children.append(child)

    def answer(self, process: int, code: int = 0) -> tuple[dict[int, int], str]:
        """Bytes that a process held of each version, and its log, once it has ended."""
        child = self.children[process]
        out, log = child.communicate(timeout=600)
        assert child.returncode == code, log[-3000:]
        return dict(json.loads(line) for line in out.splitlines()), log

    def stop(self) -> None:
        for child in self.children:
            if child.poll() is None:
                child.kill()
            child.communicate()
        self.children.clear()


@pytest.fixture(params=["log", pytest.param("files", marks=pytest.mark.long)])
def team(request: pytest.FixtureRequest, run: RealRun, tmp_path: Path) -> Iterator[Team]:
    team = Team(run, str(tmp_path / "weights") if request.param == "files" else "")
    yield team
    team.stop()


def live(run: RealRun, url: str = "") -> set[object]:
    """Chunks on the topic that are no tombstones, and files."""
    last = {record.key: record.value for record in read_to_end(run.kafka, run.topic("weights"))}
    files = {str(path) for path in Path(url).glob("*/*/*")} if url else set()
    return {decode_key(key) for key, value in last.items() if value is not None} | files


def named(run: RealRun, versions: range) -> set[object]:
    """Chunks and files in the manifests of these versions."""
    manifests = read_manifests(run.kafka, run.name)
    return {
        chunk.url or (version, manifests[version].epoch, chunk.index)
        for version in versions
        for chunk in manifests[version].chunks
    }


def followed(run: RealRun, at_least: int) -> tuple[int, str]:
    """The version that a follower which joins now gets, and its digest."""
    with WeightsFollower(run.kafka, run.name) as follower:
        version, arrays = follower.wait_for(at_least, 600)
    return version, params_digest(arrays)


def test_each_process_publishes_its_tensors_and_followers_have_every_version(team: Team, run: RealRun) -> None:
    with WeightsFollower(run.kafka, run.name) as stays:
        team.start(3, 4)
        held = [team.answer(process)[0] for process in range(3)]
        version, arrays = stays.wait_for(4, 600)
        assert (version, params_digest(arrays)) == (4, params_digest(params_of(4)))
    assert followed(run, 4) == (4, params_digest(params_of(4))), "by the full version and four deltas"
    manifests = read_manifests(run.kafka, run.name)
    assert "".join(manifests[version].kind[0] for version in range(5)) == "fdddd"
    whole = sum(array.nbytes for array in params_of(0).values())
    for version, manifest in manifests.items():
        assert manifest.digest == params_digest(params_of(version))
        assert manifest.params_digest == "of all"
        # Each process has two of six tensors on its host; not even the lead has more.
        assert [of_one[version] for of_one in held] == [whole / 3] * 3
        assert manifest.figures["largest_shard_bytes"] == whole / 3
        assert manifest.figures["full_bytes"] == whole
        assert [chunk.index for chunk in manifest.chunks] == list(range(len(manifest.chunks)))
    assert live(run, team.url) == named(run, range(5)), "the newest three build on all"


@pytest.mark.parametrize(
    ("team", "moment"),
    [
        ("log", "report"),
        pytest.param("log", "3", marks=pytest.mark.long),
        pytest.param("files", "report", marks=pytest.mark.long),
    ],
    indirect=["team"],
)
def test_a_version_of_which_a_process_dies_does_not_exist_and_the_next_team_publishes_it(
    team: Team, run: RealRun, moment: str
) -> None:
    """The process dies between its chunks, or after the last one and before it reports them."""
    team.start(2, 0)
    team.answer(0)
    before = followed(run, 0)
    team.start(2, 1, {1: moment}, SHORT_S)
    team.answer(1, -signal.SIGKILL)
    _published, log = team.answer(0, 1)
    assert "policy version 1 is not published: process 1 of 2 of the learner did not report the chunks" in log
    assert sorted(read_manifests(run.kafka, run.name)) == [0]
    assert followed(run, 0) == before
    assert live(run, team.url) > named(run, range(1)), "what was begun is there, and is nobody's"
    team.start(2, 2)
    team.answer(0)
    team.answer(1)
    assert followed(run, 2) == (2, params_digest(params_of(2)))
    assert live(run, team.url) == named(run, range(3)), "and goes when the next team starts"


def test_a_version_whose_lead_dies_after_the_barrier_does_not_exist(team: Team, run: RealRun) -> None:
    team.start(2, 0, {0: "commit"})
    team.answer(0, -signal.SIGKILL)
    assert not read_manifests(run.kafka, run.name)
    team.start(2, 1)
    assert list(team.answer(0)[0]) == list(team.answer(1)[0]) == [0, 1]
    assert followed(run, 1) == (1, params_digest(params_of(1)))
    assert live(run, team.url) == named(run, range(2))
