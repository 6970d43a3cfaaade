"""Versions in files: a publisher that is killed leaves nothing torn, and roles pass versions through files."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.follower import WeightsFollower
from rollstream.consumers.weights.manifests import read_manifests
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.wire.params_digest import params_digest
from tests.model.test_weights_files import answer, holds, named, stored, writer
from tests.support.faulty_store import HANG, SHORT, FaultyFiles, faulty_store
from tests.support.http_front import BUSY, http_front
from tests.support.log_lines import log_lines
from tests.support.paths import ROOT
from tests.support.runs import SMALL_LEARNER, RealRun, with_batches
from tests.support.s3_server import objects, s3_server
from tests.support.versions import visible_manifests
from tests.support.waiting import eventually
from tests.support.weights_child import params_of


@pytest.fixture
def faulty() -> Iterator[type[FaultyFiles]]:
    with faulty_store() as files:
        yield files


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "weights")


def killed(run: RealRun, url: str, last: int, moment: str = "commit") -> None:
    """Run a publisher that dies; by default when all files of a version are there and its manifest is not."""
    words = [run.kafka.bootstrap_servers, run.name, str(last), moment, url]
    command = [sys.executable, "-m", "tests.support.weights_child", *words]
    assert subprocess.run(command, cwd=ROOT, timeout=600).returncode == -signal.SIGKILL


def test_a_publisher_that_dies_before_the_manifest_leaves_files_that_the_next_one_uses(run: RealRun, url: str) -> None:
    killed(run, url, 0)
    [before] = stored(url).values()
    times = {path: os.stat(path).st_mtime_ns for path in before}
    assert not read_manifests(run.kafka, run.name)
    with writer(run, url, file_bytes=4000) as source, WeightsFollower(run.kafka, run.name) as follower:
        source.publish_version(params_of(0))
        assert holds(follower, 0)
        assert stored(url) == named(run) == {0: before}
        assert {path: os.stat(path).st_mtime_ns for path in before} == times, "none was written again"

    killed(run, url, 1)
    left = stored(url)[1]
    with writer(run, url, file_bytes=4000) as source, WeightsFollower(run.kafka, run.name) as follower:
        assert stored(url)[1] == left
        source.publish_version(params_of(5))
        assert params_digest(follower.wait_for(1, 300)[1]) == params_digest(params_of(5))
        assert stored(url) == named(run)
        assert not stored(url)[1] & left, "its bytes were those of another version"


@pytest.mark.parametrize(
    "moments", [(5, 13), pytest.param(range(1, 14), marks=pytest.mark.long)], ids=["two", "between any two files"]
)
def test_a_publisher_killed_between_files_leaves_nothing_torn(run: RealRun, url: str, moments: Sequence[int]) -> None:
    """A full version has twelve files here; the thirteenth file is that of the delta after it."""
    last = -1
    with WeightsFollower(run.kafka, run.name) as stays:
        for moment in moments:
            killed(run, url, last + 2, str(moment))
            committed = max(read_manifests(run.kafka, run.name), default=-1)
            assert committed == last + (moment > 12)
            last += 2
            with writer(run, url, file_bytes=4000) as source, WeightsFollower(run.kafka, run.name) as joins:
                for version in range(committed + 1, last + 1):
                    source.publish_version(params_of(version))
                assert holds(stays, last)
                assert holds(joins, last)
            files = named(run)
            kept = stored(url)
            assert {last - 1, last} <= kept.keys()
            assert all(paths == files[version] for version, paths in kept.items()), "no file without its manifest"


def test_versions_pass_through_an_s3_server(run: RealRun) -> None:
    with s3_server() as bucket:
        with (
            writer(run, f"{bucket}/some/where") as source,
            WeightsFollower(run.kafka, run.name) as follower,
        ):
            for version in range(6):
                source.publish_version(params_of(version))
                assert holds(follower, version)
        files = named(run)
        assert objects().keys() == {url.removeprefix(f"{bucket}/") for version in (4, 5) for url in files[version]}
        with writer(run, f"{bucket}/some/where") as source, WeightsFollower(run.kafka, run.name) as follower:
            source.publish_version(params_of(6))
            assert holds(follower, 6)
        results = answer(run, f"{bucket}/some/where", "weights", "verify", "5", "6")
        assert [entry["result"] for entry in results] == ["whole", "whole"]  # type: ignore[attr-defined]


def test_an_s3_server_that_answers_503_or_cuts_answers_off_costs_time_only(
    run: RealRun, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The faults are on the wire, between the client of S3 and its server."""
    with s3_server() as bucket, http_front(os.environ["AWS_ENDPOINT_URL"]) as front:
        monkeypatch.setenv("AWS_ENDPOINT_URL", front.url)
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        with (
            writer(run, f"{bucket}/w") as source,
            WeightsFollower(run.kafka, run.name, config=WeightsConfig(fetch_timeout_s=3.0)) as follower,
        ):
            front.faults["PUT"].extend([BUSY] * 4)
            front.faults["GET"].extend([BUSY, SHORT, BUSY, SHORT])
            source.publish_version(params_of(0))
            assert holds(follower, 0)
            front.always["GET"] = BUSY
            source.publish_version(params_of(1))
            eventually(lambda: "policy_put_off" in log_lines(caplog), 300, "a version is put off")
            assert follower.version == 0
            front.always["GET"] = SHORT
            struck = front.struck["GET", SHORT]
            eventually(lambda: front.struck["GET", SHORT] > struck, 300, "an answer is cut off")
            assert follower.version == 0
            front.always.clear()
            assert holds(follower, 1)
        assert front.struck["PUT", BUSY] == 4
        assert front.struck["GET", BUSY] > 2


def test_a_fetch_whose_store_hangs_says_how_far_it_is(
    run: RealRun, faulty: type[FaultyFiles], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    faulty.always["read:bucket/w/" + run.name + "/00000000/000001"] = HANG
    with (
        writer(run, "faulty://bucket/w") as source,
        WeightsFollower(run.kafka, run.name, config=WeightsConfig(fetch_timeout_s=300.0)) as follower,
    ):
        source.publish_version(params_of(0))
        chunks = visible_manifests(run, 0)[0].chunks
        assert len(chunks) > 1
        size = sum(chunk.size_bytes for chunk in chunks if chunk.index != 1)
        expected = {"version": 0, "fetched": len(chunks) - 1, "of": len(chunks), "size_bytes": size}

        def told() -> bool:
            lines = [line for line in log_lines(caplog).splitlines() if '"policy_fetching"' in line]
            return any(expected.items() <= json.loads(line).items() for line in lines)

        eventually(told, 60, "the progress, of all files but one")
        faulty.released.set()
        assert holds(follower, 0)


def test_a_manifest_has_the_seconds_that_its_store_took(run: RealRun, faulty: type[FaultyFiles]) -> None:
    faulty.always["write:"] = HANG

    def release() -> None:
        eventually(lambda: any(call == "write" for call, _ in faulty.calls), 300, "a write that hangs")
        threading.Timer(1.5, faulty.released.set).start()

    releasing = threading.Thread(target=release)
    with writer(run, "faulty://bucket/w") as source:
        releasing.start()
        source.publish_version(params_of(0))
    releasing.join()
    figures = visible_manifests(run, 0)[0].figures
    assert figures["send_s"] >= max(1.5, figures["compare_s"])


@pytest.mark.long
def test_a_learner_publishes_to_files_and_an_inference_server_follows(real_run: RealRun, url: str) -> None:
    settings = {
        **SMALL_LEARNER,
        "learner__weights__transport": "files",
        "learner__weights__url": url,
        "learner__weights__keep_versions": 2,
        "learner__max_steps": 3,
    }
    run = with_batches(real_run, 12)
    learner = run.start("learn", **settings)
    server = run.start("infer")
    assert learner.wait(600) == 0, run.log_of(learner)[-3000:]
    newest = max(read_manifests(run.kafka, run.name))
    assert newest >= 3

    def followed() -> bool:
        assert server.poll() is None, run.log_of(server)[-3000:]
        swaps = [line for line in run.log_of(server).splitlines() if '"policy_followed"' in line]
        return bool(swaps) and json.loads(swaps[-1])["version"] == newest

    eventually(followed, 300, f"the server follows to version {newest}")
    assert not list(read_to_end(run.kafka, run.topic("weights"), isolation="read_uncommitted"))
    assert stored(url)[newest] == named(run)[newest]
