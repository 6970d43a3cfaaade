"""Files of versions that may be deleted: only our own, none that is young, and none that a kept version builds on."""

from collections.abc import Mapping
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from rollstream.consumers.weights.chains import needed
from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.content import file_name
from rollstream.consumers.weights.file_retention import incomplete, left_behind, listed_files, prunable, roots
from rollstream.topics.files.stores import StoredFile, open_store
from rollstream.topics.records import Chunk, PolicyManifest
from tests.support.manifests import one_chunk_manifest

NOW, HOUR_S = 1e9, 3600.0


def name(version: int, attempt: int = 0) -> str:
    return file_name("main", version, 0, f"{attempt:064x}")


def manifest(version: int, base: int = -1, url: str = "/w") -> PolicyManifest:
    """A version in one file; version 0 and those without a base are full."""
    chunk = Chunk(index=0, partition=-1, offset=-1, size_bytes=5, digest="", url=f"{url}/{name(version)}")
    return one_chunk_manifest(version, chunk, base=base)


def published(anchors: set[int], versions: int) -> dict[int, PolicyManifest]:
    return {v: manifest(v, -1 if v == 0 or v in anchors else v - 1) for v in range(versions)}


def listed(ages_h: Mapping[str, float]) -> dict[str, Mapping[str, StoredFile] | str]:
    return {"/w": {name: StoredFile(5, NOW - age * HOUR_S) for name, age in ages_h.items()}}


@given(anchors=st.sets(st.integers(0, 12)), versions=st.integers(1, 12), keep=st.integers(1, 5), hours=st.floats(0, 50))
def test_prune_removes_exactly_what_no_kept_version_builds_on_and_is_old_enough(
    anchors: set[int], versions: int, keep: int, hours: float
) -> None:
    manifests = published(anchors, versions)
    files = {name(v, attempt): hours for v in range(versions + 1) for attempt in (0, 1)}
    [deletions] = prunable("main", listed(files), manifests, WeightsConfig(url="/w", keep_versions=keep), now_s=NOW)
    kept = {f"/w/{name(v)}" for v in needed(manifests, keep)}
    old = {f"/w/{file}" for file in files} if hours > 24 else set()
    assert set(deletions.removable) == old - kept
    assert deletions.files == len(files)
    assert deletions.size_bytes == 5 * len(deletions.removable)


def test_files_of_others_and_of_versions_that_cannot_be_told_stay() -> None:
    manifests = published(set(), 4)
    del manifests[1]
    strangers = ["main/notes.txt", "main/00000002/readme", name(1)]
    assert left_behind("main", strangers, manifests, 1) == []
    assert left_behind("main", [name(3), name(4)], {}, 1) == [name(3), name(4)]


def test_nothing_goes_while_a_manifest_is_unreadable_or_a_store_gives_no_list() -> None:
    manifests, config = published({3}, 4), WeightsConfig(url="/w", keep_versions=1)
    files = listed({name(v): 100.0 for v in range(4)})
    assert len(prunable("main", files, manifests, config, now_s=NOW)[0].removable) == 3
    [deletions] = prunable("main", files, manifests, config, unreadable=1, now_s=NOW)
    assert (deletions.removable, deletions.problem) == ((), "1 unreadable records of policies may name these files")
    [deletions] = prunable("main", {"/w": "503 Slow Down"}, manifests, config, now_s=NOW)
    assert (deletions.removable, deletions.problem) == ((), "not listed: 503 Slow Down")


def test_files_stay_if_their_store_has_another_url_now() -> None:
    manifests, files = published(set(), 4), [name(version) for version in range(4)]
    moved = {f"/elsewhere{url}": stored for url, stored in listed(dict.fromkeys(files, 100.0)).items()}
    [deletions] = prunable("main", moved, manifests, WeightsConfig(url="/elsewhere/w", keep_versions=1), now_s=NOW)
    assert (deletions.files, deletions.removable) == (4, ())


def test_versions_whose_files_are_missing_or_cut_short_are_incomplete_while_they_are_needed() -> None:
    manifests = published({4}, 7)
    files = {name(version): StoredFile(5, NOW) for version in range(7)}
    assert incomplete("main", "/w", files, manifests, 2) == set()
    del files[name(4)], files[name(1)]
    files[name(6)] = StoredFile(4, NOW)
    assert incomplete("main", "/w", files, manifests, 2) == {4, 6}
    assert incomplete("main", "/w", files, manifests, 4) == {1, 4, 6}
    assert incomplete("main", "/elsewhere", {}, manifests, 4) == set(), "files at another URL are not listed"
    assert incomplete("again", "/w", {}, manifests, 4) == set(), (
        "nor are those of the run that was restored as this one"
    )
    on_log = Chunk(index=0, partition=0, offset=0, size_bytes=5, digest="")
    assert incomplete("main", "/w", {}, {0: one_chunk_manifest(0, on_log)}, 2) == set()


def test_files_of_a_version_whose_manifest_is_unreadable_stay() -> None:
    manifests, newest = published({2}, 3), [name(3), name(4)]
    assert left_behind("main", newest, manifests, 1) == newest
    assert left_behind("main", newest, manifests, 1, unreadable={3}) == [name(4)]


def test_files_without_a_time_stay() -> None:
    files: dict[str, Mapping[str, StoredFile] | str] = {"/w": {name(7): StoredFile(5, None)}}
    assert prunable("main", files, {}, WeightsConfig(url="/w"), now_s=NOW)[0].removable == ()


def test_files_are_looked_for_at_the_url_of_the_settings_and_at_those_in_manifests() -> None:
    manifests = [manifest(0), manifest(1, url="/old"), manifest(2, url="memory://b")]
    assert sorted(roots("main", WeightsConfig(url="/w/"), manifests)) == ["/old", "/w", "memory://b"]
    assert roots("main", WeightsConfig(), []) == []


def test_a_directory_in_use_without_a_folder_of_the_run_is_not_mounted(tmp_path: Path) -> None:
    used, left = str(tmp_path / "used"), str(tmp_path / "left")
    expected = {used: f"StoreError: {used}/main is not on this machine; is it mounted?", left: {}}
    assert listed_files("main", [used, left], timeout_s=60.0, in_use=[used]) == expected
    open_store(used).write(name(0), b"12345")
    assert listed_files("main", [used], timeout_s=60.0, in_use=[used])[used].keys() == {name(0)}  # type: ignore[union-attr]


def test_a_url_that_this_process_cannot_open_is_listed_with_the_reason() -> None:
    """A manifest of the run may name a store that was used once, on a machine that lacks the package for it."""
    urls = roots("main", WeightsConfig(), [manifest(0, url="nowhere://bucket/w/")])
    assert urls == ["nowhere://bucket/w"]
    [reason] = listed_files("main", urls, timeout_s=60.0).values()
    assert isinstance(reason, str)
    assert "nowhere" in reason
