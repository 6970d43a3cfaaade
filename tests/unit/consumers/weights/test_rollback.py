"""A rollback stores a version where its bytes are, or says which versions are kept."""

import pytest

from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.rollback import placed, unfetchable
from rollstream.topics.records import Chunk, PolicyManifest
from tests.support.manifests import one_chunk_manifest


def manifest(version: int, url: str, base: int = -1) -> PolicyManifest:
    chunk = Chunk(index=0, partition=-1, offset=-1, size_bytes=5, digest="", url=url)
    return one_chunk_manifest(version, chunk, base=base)


FULL = "s3://bucket/w/main/00000000/000000-a"
ON_LOG = ""


@pytest.mark.parametrize(
    ("urls", "settings", "place"),
    [
        ([FULL], {}, ("files", "s3://bucket/w")),
        ([FULL, ON_LOG], {}, ("files", "s3://bucket/w")),
        ([FULL, "/w/main/00000001/000000-b"], {}, ("files", "/w")),
        ([ON_LOG, ON_LOG], {}, ("auto", "")),
        ([FULL], {"transport": "log"}, ("log", "")),
        ([FULL], {"url": "/other"}, ("auto", "/other")),
    ],
)
def test_a_version_is_stored_where_its_files_are_unless_the_settings_name_a_place(
    urls: list[str], settings: dict[str, str], place: tuple[str, str]
) -> None:
    manifests = {version: manifest(version, url, version - 1) for version, url in enumerate(urls)}
    config = placed(WeightsConfig(**settings), manifests, len(urls) - 1)  # type: ignore[arg-type]
    assert (config.transport, config.url) == place


def test_a_version_that_is_gone_is_refused_with_the_versions_that_are_kept_and_what_else_helps() -> None:
    manifests = {version: manifest(version, FULL, -1 if version % 4 == 0 else version - 1) for version in range(11)}
    reason = unfetchable("main", 3, "missing", manifests, 2)
    assert reason.startswith("policy version 3 of run main cannot be published again: its weights, or those of a ")
    assert "are missing. Other versions that are kept with learner.weights.keep_versions 2: 8, 9, 10; " in reason
    assert "Raise keep_versions" in reason
    assert "`rollstream fork`" in reason
    assert "keep_versions 1: none; " in unfetchable("main", 8, "damaged", {8: manifests[8]}, 1)
