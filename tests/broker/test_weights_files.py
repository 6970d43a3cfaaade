"""Versions whose bytes lie in files: published whole or not at all, followed as those on the log, and cleaned up."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3

from rollstream.consumers.step_writer import StepWriter
from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.follower import VersionSource, WeightsFollower, WholeVersion
from rollstream.consumers.weights.manifests import read_manifests
from rollstream.topics.errors import DeliveryError
from rollstream.topics.kafka import provisioning
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.wire.params_digest import params_digest
from tests.support.command_line import answer_of
from tests.support.faulty_store import HANG, SHORT, SLOW_DOWN, FaultyFiles, faulty_store
from tests.support.http_front import BUSY, http_front
from tests.support.log_lines import log_lines
from tests.support.paths import ROOT
from tests.support.runs import SMALL_LEARNER, RealRun, with_batches
from tests.support.s3_server import objects, s3_server
from tests.support.versions import visible_manifests
from tests.support.waiting import eventually
from tests.support.weights_child import params_of

FILES = WeightsConfig(transport="files", url="?", file_bytes=20_000, keep_versions=2, anchor_every=4)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "weights")


@pytest.fixture
def faulty() -> Iterator[type[FaultyFiles]]:
    with faulty_store() as files:
        yield files


def writer(run: RealRun, url: str, **settings: object) -> StepWriter:
    return StepWriter(run.kafka, run.name, config=replace(FILES, url=url, **settings))  # type: ignore[arg-type]


def holds(follower: WeightsFollower, version: int) -> bool:
    """Whether a follower gets exactly this version, however long it takes."""
    return params_digest(follower.wait_for(version, 300)[1]) == params_digest(params_of(version))


def stored(folder: str) -> dict[int, set[str]]:
    """Paths of the files by version."""
    collected: dict[int, set[str]] = {}
    for path in Path(folder).glob("*/*/*"):
        collected.setdefault(int(path.parent.name), set()).add(str(path))
    return collected


def named(run: RealRun) -> dict[int, set[str]]:
    """URLs in the manifests by version."""
    manifests = read_manifests(run.kafka, run.name)
    return {version: {chunk.url for chunk in manifest.chunks} for version, manifest in manifests.items()}


def answer(run: RealRun, url: str, *words: str, code: int = 0) -> object:
    """Answer of a command that is told where the files are."""
    settings = ["--set", f"learner.weights.url={url}", "--set", "learner.weights.keep_versions=2"]
    actual = answer_of(run.directory, *words, "--run", run.name, "-b", run.kafka.bootstrap_servers, "--json", *settings)
    assert actual.returncode == code, actual.stderr
    return json.loads(actual.stdout)


def test_versions_pass_through_files_alone_which_go_when_nothing_builds_on_them(run: RealRun, url: str) -> None:
    with writer(run, url) as source, WeightsFollower(run.kafka, run.name) as stays:
        for version in range(7):
            source.publish_version(params_of(version))
            assert holds(stays, version)
        assert not list(read_to_end(run.kafka, run.topic("weights"), isolation="read_uncommitted"))
        manifests = read_manifests(run.kafka, run.name)
        assert "".join(manifests[version].kind[0] for version in range(7)) == "fdddfdd"
        sizes = {version: sum(chunk.size_bytes for chunk in m.chunks) for version, m in manifests.items()}
        assert max(sizes[1], sizes[5]) < sizes[0] / 10
        files = named(run)
        assert stored(url) == {version: files[version] for version in (4, 5, 6)}, "5 and 6 are kept and need 4"
        for chunk in manifests[4].chunks:
            data = Path(chunk.url).read_bytes()
            assert (len(data), blake3(data).hexdigest()) == (chunk.size_bytes, chunk.digest)
        with WeightsFollower(run.kafka, run.name) as joins:
            assert holds(joins, 6)

    listed = answer(run, url, "weights", "ls")
    assert [entry["chunks_state"] for entry in listed] == ["gone"] * 4 + ["there"] * 3  # type: ignore[attr-defined]
    results = answer(run, url, "weights", "verify")
    assert [entry["result"] for entry in results] == ["no longer kept"] * 4 + ["whole"] * 3  # type: ignore[attr-defined]
    pulled = answer(run, url, "weights", "export", "6", "-o", str(run.directory / "pulled"), "--format", "npz")
    assert pulled["digest"] == manifests[6].digest  # type: ignore[index]
    assert answer(run, url, "weights", "diff", "5", "6")["changed"] > 0  # type: ignore[index]


def test_a_run_restored_under_another_name_removes_no_files_of_the_first(run: RealRun, url: str) -> None:
    with writer(run, url, keep_versions=1, anchor_every=1) as source:
        for version in range(2):
            source.publish_version(params_of(version))
    again = run.beside("again")
    provisioning.apply(again.kafka, again.topics, again.name)
    for record in read_to_end(run.kafka, run.topic("policies")):
        again.send_bytes("policies", record.value or b"", record.key or b"", 0)
    listed = answer(again, url, "weights", "ls")
    assert [entry["chunks_state"] for entry in listed] == ["gone", "there"]  # type: ignore[attr-defined]
    with writer(again, url, keep_versions=1, anchor_every=1) as source:
        for version in range(2, 5):
            source.publish_version(params_of(version))
    assert {Path(path).parts[-3] for path in named(again)[4]} == {again.name}
    assert set(stored(f"{url}/")) == {1, 4}, "the newest version of each run"
    with WeightsFollower(run.kafka, run.name) as joins:
        assert holds(joins, 1)


def test_a_small_version_stays_on_the_log_and_a_large_one_goes_to_files(run: RealRun, url: str) -> None:
    limit = sum(array.nbytes for array in params_of(0).values()) // 2
    with (
        writer(run, url, transport="auto", files_above_bytes=limit) as source,
        WeightsFollower(run.kafka, run.name) as follower,
    ):
        for version in range(3):
            source.publish_version(params_of(version))
            assert holds(follower, version)
    places = named(run)
    assert (places[1], places[2]) == ({""}, {""}), "deltas are small"
    assert stored(url) == {0: places[0]}


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


@pytest.mark.long
def test_prune_removes_exactly_the_old_files_that_no_kept_version_needs(run: RealRun, url: str) -> None:
    with writer(run, url, anchor_every=1) as source:
        for version in range(4):
            source.publish_version(params_of(version))
        # A publisher that died before it removed them, or before its manifest, leaves such files.
        root = Path(url) / run.name
        for version, digest in ((0, "a"), (3, "b"), (4, "c"), (4, "d")):
            path = root / f"{version:08d}" / f"000000-{digest * 64}"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"12345")
            if digest != "d":
                os.utime(path, (time.time() - 90_000,) * 2)
        for path in root.glob("*/*"):
            if path.stat().st_size > 5:
                os.utime(path, (1.0, 1.0))
        (root / "notes").write_text("not ours")
        kept = named(run)
        assert stored(url).keys() == {0, 2, 3, 4}

        # Without the learner's settings it spares what manifests name: the learner may keep more versions.
        where = ("--run", run.name, "-b", run.kafka.bootstrap_servers, "--json")
        alone = answer_of(run.directory, "prune", "--dry-run", "--set", "learner.weights.keep_versions=1", *where)
        assert [plan["removable"] for plan in json.loads(alone.stdout)["weight_files"]] == [3], alone.stderr
        planned = answer(run, url, "prune", "--dry-run")
        [plan] = planned["weight_files"]  # type: ignore[index]
        assert (plan["url"], plan["removable"], plan["size_bytes"], plan["problem"]) == (url, 3, 15, "")
        assert stored(url).keys() == {0, 2, 3, 4}
        answer(run, url, "prune", "--yes")
        young = str(root / "00000004" / f"000000-{'d' * 64}")
        assert stored(url) == {2: kept[2], 3: kept[3], 4: {young}}
        assert (root / "notes").exists()
        with WeightsFollower(run.kafka, run.name) as follower:
            assert holds(follower, 3)


@pytest.mark.parametrize("fault", ["missing", "damaged"])
def test_a_lost_or_damaged_file_is_refused_by_name_and_the_next_full_version_heals_it(
    run: RealRun, url: str, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with writer(run, url) as source, WeightsFollower(run.kafka, run.name) as follower:
        source.publish_version(params_of(0))
        assert holds(follower, 0)
        path = min(Path(url).glob("*/*/*"))
        data = path.read_bytes()
        path.unlink() if fault == "missing" else path.write_bytes(b"x" + data[1:])
        for version in (1, 2, 3):
            source.publish_version(params_of(version))
            assert holds(follower, version), "it holds version 0 and needs the deltas alone"
        with WeightsFollower(run.kafka, run.name) as joins:
            eventually(lambda: str(path) in log_lines(caplog), 300, "the file is named")
            assert joins.version == -1
            source.publish_version(params_of(4))
            assert holds(joins, 4)
    assert f"{path}" in log_lines(caplog)
    assert ("is missing; the next full version" if fault == "missing" else "is damaged: chunk 0") in log_lines(caplog)


def test_a_store_that_fails_for_a_while_keeps_followers_on_the_version_they_have(
    run: RealRun, faulty: type[FaultyFiles], caplog: pytest.LogCaptureFixture
) -> None:
    with (
        writer(run, "faulty://bucket/w", store_timeout_s=0.5) as source,
        WeightsFollower(run.kafka, run.name, config=WeightsConfig(fetch_timeout_s=0.5)) as follower,
    ):
        faulty.faults["write:"].extend([SLOW_DOWN, SHORT])
        faulty.faults["read:"].extend([SLOW_DOWN, SHORT])
        source.publish_version(params_of(0))
        assert holds(follower, 0)

        faulty.always["read:"] = SLOW_DOWN
        source.publish_version(params_of(1))
        eventually(lambda: "policy_put_off" in log_lines(caplog), 300, "a version is put off")
        assert follower.version == 0
        faulty.always["write:"] = SLOW_DOWN
        with pytest.raises(DeliveryError, match="policy version 2 was not written to faulty://"):
            source.publish_version(params_of(2))
        faulty.always.clear()
        assert holds(follower, 1)
        source.publish_version(params_of(2))
        assert holds(follower, 2)
    assert "503 Slow Down" in log_lines(caplog)
    assert "password" not in log_lines(caplog)


def test_a_source_that_can_fetch_nothing_for_long_keeps_few_manifests_and_then_gets_the_newest(
    run: RealRun, faulty: type[FaultyFiles]
) -> None:
    newest = 40
    with (
        writer(run, "faulty://bucket/w") as publisher,
        VersionSource(run.kafka, run.name, config=WeightsConfig(fetch_timeout_s=0.2)) as source,
    ):

        def fetched(version: int) -> WholeVersion | None:
            whole = source.poll()
            return whole if whole is not None and whole.manifest.version == version else None

        publisher.publish_version(params_of(0))
        eventually(lambda: fetched(0), 300, "version 0 is held")
        faulty.always["read:"] = SLOW_DOWN
        for version in range(1, newest + 1):
            publisher.publish_version(params_of(version))
            assert source.poll() is None
        eventually(lambda: fetched(newest) or newest in source.known_versions, 300, "every manifest is read")
        assert len(source.known_versions) <= 8 + FILES.anchor_every, "8 candidates and the full version before them"
        faulty.always.clear()
        whole = eventually(lambda: fetched(newest), 300, "the newest version is held")
        assert params_digest(whole.arrays) == params_digest(params_of(newest))


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
