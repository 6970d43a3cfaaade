"""Files of archives and group stores, read by Hugging Face's `datasets`, which is told nothing about their columns."""

from pathlib import Path
from typing import Any

import pytest

from rollstream.consumers.archive.tables import ArchivedRecord
from rollstream.consumers.archive.writer import ArchiveWriter
from rollstream.consumers.grouping.makers.reservoir import ReservoirBatchMaker
from rollstream.topics.files.stores import open_store
from rollstream.topics.records import LearnerStep, Rollout, Turn
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from tests.support.batches import random_batch
from tests.support.group_stores import context, group, opened
from tests.support.runs import rollout

DAY_MS = 86_400_000
TURNS = (Turn(role="user", text="1+1="), Turn(role="assistant", text="f\u00fcnf"))


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def loaded(files: str, cache: Path, streaming: bool) -> Any:
    from datasets import load_dataset

    return load_dataset("parquet", data_files=files, split="train", streaming=streaming, cache_dir=str(cache))


def subjects() -> list[Rollout]:
    """Rollouts whose files differ in their content: components of the reward, texts with it, environments, days."""
    return [
        rollout(
            f"e{n}",
            n,
            environment=f"env{n % 2}",
            turns=TURNS,
            reward_components={"exact": n / 8} if n % 2 else {},
            extra={"source": "file"} if n > 4 else {},
        )
        for n in range(8)
    ]


def archive(root: Path, *, arrays: bool) -> None:
    writer = ArchiveWriter(open_store(str(root)), "main", arrays=arrays)
    steps = [
        LearnerStep(
            learner="main", step=n, input_run="main", uses=(), position=n, policy_version=n, params_digest="",
            trained_total=0, skipped_total=0, metrics={"loss": 1.0 / (n + 1)},
        )
        for n in range(2)
    ]  # fmt: skip
    topics: dict[str, list[Any]] = {"rollouts": subjects(), "batches": [random_batch(0, rows=4)], "steps": steps}
    for topic, records in topics.items():
        writer.begin(topic, topic, {0: 0})
        for offset, record in enumerate(records):
            key = encode_key("env", offset)
            writer.add(ArchivedRecord(topic, 0, offset, DAY_MS * (1 + offset // 4), key, encode(record)))
    writer.commit({(topic, 0): len(records) for topic, records in topics.items()})
    writer.close()


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("arrays", [False, True])
def test_every_table_of_an_archive_loads_and_has_the_values_of_the_records(
    tmp_path: Path, cache: Path, arrays: bool, streaming: bool
) -> None:
    archive(tmp_path, arrays=arrays)
    for table in ("log", "turns", "groups"):
        assert list(loaded(f"{tmp_path}/run=main/table={table}/**/*.parquet", cache, streaming))
    rows = {row["uid"]: row for row in loaded(f"{tmp_path}/run=main/table=rollouts/**/*.parquet", cache, streaming)}
    assert len(rows) == 8
    for subject in subjects():
        row = rows[subject.uid]
        assert (row["environment"], row["reward"], row["length"]) == (subject.environment, subject.reward, 6)
        for name in ("reward_components", "extra"):
            assert {e["key"]: e["value"] for e in row[name]} == dict(getattr(subject, name))
        assert row["tokens"] == (subject.tokens.tolist() if arrays else None)
    steps = loaded(f"{tmp_path}/run=main/table=steps/**/*.parquet", cache, streaming)
    assert [row["metrics"] for row in steps] == [[{"key": "loss", "value": 1.0}], [{"key": "loss", "value": 0.5}]]
    batches = loaded(f"{tmp_path}/run=main/table=batches/**/*.parquet", cache, streaming)
    assert len(list(batches)) == 4


@pytest.mark.parametrize("streaming", [False, True])
def test_groups_and_batches_of_a_store_load(tmp_path: Path, cache: Path, streaming: bool) -> None:
    with opened(tmp_path / "store", ReservoirBatchMaker(context())) as store:
        store.add_rollouts(group())
        store.add_rollouts(group("r"))
        assert store.create_and_store_batch(4)
    rows = list(loaded(f"{tmp_path}/store/**/part-*.parquet", cache, streaming))
    assert sorted(row["rollout_uid"] for row in rows) == sorted(r.uid for r in (*group(), *group("r")))
    assert {row["rollout_reward"] for row in rows} == {0.0, 1.0}
    examples = list(loaded(f"{tmp_path}/store/**/batch_*.parquet", cache, streaming))
    assert [row["example_idx"] for row in examples] == [0, 1, 2, 3]
    assert all(len(row["tokens"]) == len(row["advantage"]) > 0 for row in examples)
