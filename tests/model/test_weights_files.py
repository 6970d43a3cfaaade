"""Versions whose bytes lie in files: published whole or not at all, followed as those on the log, and cleaned up."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3

from rollstream.consumers.trainers.step_writer import StepWriter
from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.follower import VersionSource, WeightsFollower, WholeVersion
from rollstream.consumers.weights.manifests import read_manifests
from rollstream.topics.errors import DeliveryError
from rollstream.topics.kafka import provisioning
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.wire.params_digest import params_digest
from tests.support.command_line import answer_of
from tests.support.faulty_store import SHORT, SLOW_DOWN, FaultyFiles, faulty_store
from tests.support.log_lines import log_lines
from tests.support.runs import RealRun
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


@pytest.mark.kafka
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
