"""Names of files of versions, which say what the files hold, and the rule that decides between log and files."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.file_names import ChunkFile, file_name, folder_of, in_files, parsed, place_of, root_of
from rollstream.topics.errors import ConfigurationError

RUNS = st.from_regex(r"[A-Za-z0-9._-]{1,20}", fullmatch=True)
NUMBERS = st.integers(0, 10**12)
DIGESTS = st.text("0123456789abcdef", min_size=64, max_size=64)


@given(run=RUNS, version=NUMBERS, chunk=NUMBERS, digest=DIGESTS, root=st.sampled_from(["/weights", "s3://bucket", "/"]))
def test_a_name_says_what_a_file_holds_and_where_it_lies(
    run: str, version: int, chunk: int, digest: str, root: str
) -> None:
    name = file_name(run, version, chunk, digest)
    assert parsed(run, name) == ChunkFile(version, chunk, digest)
    url = f"{root.rstrip('/')}/{name}"
    assert place_of(url) == (root, name)
    assert root_of(run, url) == root
    assert parsed(run + "x", name) is None, "runs share a store"
    assert parsed(run, f"{name}.4711-0a.unfinished") == ChunkFile(version, chunk, digest, whole=False)


@pytest.mark.parametrize("name", ["main", "main/notes.txt", "main/1/2-3", "main/00000001/000000-xyz", "other/00000001"])
def test_files_of_others_are_not_ours(name: str) -> None:
    assert parsed("main", name) is None
    assert root_of("main", f"/weights/{name}") is None
    assert folder_of(f"/weights/{name}") is None


@pytest.mark.parametrize(("run", "folder"), [("main", ("/w", "main")), ("..", None), ("", None), (".hidden", None)])
def test_the_folder_of_a_file_is_that_of_a_run_and_leads_out_of_no_store(
    run: str, folder: tuple[str, str] | None
) -> None:
    assert folder_of(f"/w/{run}/00000001/000000-{'0' * 64}") == folder


@given(size=st.integers(0, 10**12), limit=st.integers(0, 10**12))
def test_files_are_used_if_a_url_is_set_and_the_version_is_larger_than_the_limit(size: int, limit: int) -> None:
    assert in_files(WeightsConfig(url="/w", files_above_bytes=limit), size) == (size > limit)
    assert not in_files(WeightsConfig(files_above_bytes=limit), size)
    assert in_files(WeightsConfig(url="/w", transport="files", files_above_bytes=limit), size)
    assert not in_files(WeightsConfig(url="/w", transport="log", files_above_bytes=limit), size)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"transport": "files"}, "learner.weights.url is empty"),
        ({"url": "s3://key:verysecret@bucket/x"}, "credentials in the environment"),
        ({"url": "https://store.example/x?sig=verysecret"}, "credentials in the environment"),
        ({"file_bytes": 0}, "file_bytes 0"),
        ({"files_at_once": 0}, "files_at_once 0"),
        ({"store_timeout_s": 0.0}, "store_timeout_s is 0"),
        ({"shards_timeout_s": 0.0}, "shards_timeout_s is 0"),
        ({"orphan_hours": -1.0}, "orphan_hours is -1"),
    ],
)
def test_settings_that_cannot_be_are_refused_and_no_secret_is_shown(settings: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text) as refused:
        WeightsConfig(**settings)  # type: ignore[arg-type]
    assert "verysecret" not in str(refused.value)
