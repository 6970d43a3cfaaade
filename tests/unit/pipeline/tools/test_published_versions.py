"""Files of versions as tools list them, without a log."""

from pathlib import Path

from rollstream.consumers.weights.content import file_name
from rollstream.pipeline.tools.published_versions import PublishedVersion, files_in_stores
from rollstream.topics.files.stores import open_store
from rollstream.topics.records import Chunk
from tests.support.manifests import one_chunk_manifest


def version(number: int, root: Path, run: str) -> PublishedVersion:
    url = f"{root}/{file_name(run, number, 0, '0' * 64)}"
    chunk = Chunk(index=0, partition=-1, offset=-1, size_bytes=5, digest="", url=url)
    manifest = one_chunk_manifest(number, chunk)
    return PublishedVersion(manifest, None, 5, 1, "<f4", frozenset([str(root)]), frozenset([(str(root), run)]))


def test_files_are_listed_in_the_folder_of_every_run_that_a_manifest_names(tmp_path: Path) -> None:
    versions = {0: version(0, tmp_path, "main"), 1: version(1, tmp_path, "again")}
    for published in versions.values():
        [chunk] = published.manifest.chunks
        open_store(str(tmp_path)).write(chunk.url.removeprefix(f"{tmp_path}/"), b"12345")
    open_store(str(tmp_path)).write(file_name("other", 0, 0, "0" * 64), b"12345")
    files = files_in_stores(versions, 60.0)
    assert files.sizes == {published.manifest.chunks[0].url: 5 for published in versions.values()}
    assert files.unlisted == set()


def test_a_folder_without_the_newest_version_is_not_mounted_and_says_nothing_of_the_others(tmp_path: Path) -> None:
    versions = {0: version(0, tmp_path, "main"), 1: version(1, tmp_path, "again"), 2: version(2, tmp_path, "gone")}
    open_store(str(tmp_path)).write(versions[1].manifest.chunks[0].url.removeprefix(f"{tmp_path}/"), b"12345")
    files = files_in_stores(versions, 60.0)
    assert files.sizes == {versions[1].manifest.chunks[0].url: 5}
    assert files.unlisted == {(str(tmp_path), "gone")}
