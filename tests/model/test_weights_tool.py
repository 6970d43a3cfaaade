"""`rollstream weights` on a real broker: what is listed is there, what is pulled is whole, a rollback is on record."""

import argparse
import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from rollstream.consumers.files import safetensors_files
from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.models import huggingface
from rollstream.consumers.models.adapters import merged
from rollstream.consumers.models.config import LoraConfig
from rollstream.consumers.trainers.step_writer import StepWriter
from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.fetcher import ChunkFetcher
from rollstream.consumers.weights.follower import WeightsFollower
from rollstream.consumers.weights.publisher import WeightsPublisher
from rollstream.consumers.weights.step_log import StepLog
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.tools import weights as weights_tool
from rollstream.pipeline.tools.published_versions import PublishedVersions
from rollstream.topics.errors import Fenced
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.records import PolicyManifest
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from rollstream.topics.wire.params_digest import params_digest
from tests.support.checkpoints import random_parameters
from tests.support.command_line import answer_of
from tests.support.late_markers import committed_at_second_look
from tests.support.runs import RealRun
from tests.support.serving_engines import ARRAYS, MODEL, MODEL_JSON, published_exactly, values_digest
from tests.support.versions import visible_manifests

NORM = "model.norm.weight"


@pytest.fixture
def trainer(run: RealRun) -> Iterator[StepWriter]:
    with StepWriter(run.kafka, run.name, model=MODEL_JSON) as writer:
        yield writer


def parameters(version: int) -> dict[str, NDArray[np.float32]]:
    """Versions differ in the first `version` values of one tensor."""
    arrays = published_exactly(ARRAYS)
    arrays[NORM][:version] += np.float32(0.5)
    return published_exactly(arrays)


def weights(run: RealRun, *words: str) -> "subprocess.CompletedProcess[str]":
    where = ("--run", run.name, "-b", run.kafka.bootstrap_servers, "--json")
    return answer_of(run.directory, "weights", *words, *where)


def answer(run: RealRun, *words: str) -> Any:
    completed = weights(run, *words)
    assert completed.returncode == 0, completed.stderr
    return json.loads(completed.stdout)


def test_versions_are_listed_shown_pulled_and_compared(run: RealRun, trainer: StepWriter, tmp_path: Path) -> None:
    assert answer(run, "ls") == []
    for version in range(3):
        trainer.publish_version(parameters(version))
    listed = answer(run, "ls")
    assert [(entry["version"], entry["chunks_state"], entry["rollback"]) for entry in listed] == [
        (version, "there", None) for version in range(3)
    ]
    assert [entry["learner"] for entry in listed] == ["trainer"] * 3

    shown = answer(run, "show", "1")
    assert {tensor["name"] for tensor in shown["tensors"]} == ARRAYS.keys()
    assert shown["digest"] == listed[1]["digest"]
    assert weights(run, "show", "7").returncode == 2

    pulled = answer(run, "export", "2", "-o", str(tmp_path / "model"))
    assert values_digest(huggingface.load(pulled["path"])) == values_digest(parameters(2))
    assert huggingface.load_config(pulled["path"]).hidden_size == 8
    pulled = answer(run, "export", "0", "-o", str(tmp_path / "arrays"), "--format", "npz")
    with np.load(pulled["path"], allow_pickle=False) as stored:
        assert values_digest(dict(stored)) == values_digest(parameters(0))

    compared = answer(run, "diff", "0", "2")
    assert compared["changed"] == 2
    assert compared["values"] == sum(array.size for array in ARRAYS.values())
    changed = {tensor["tensor"]: tensor for tensor in compared["tensors"] if tensor["changed"]}
    assert changed.keys() == {NORM}
    assert changed[NORM]["max_abs_difference"] == pytest.approx(0.5, abs=0.01)


def test_texts_and_complex_numbers_are_compared(run: RealRun, trainer: StepWriter) -> None:
    first = {"labels": np.array(["a", "b"]), "phases": np.array([1 + 1j]), "states": np.array(["on"])}
    trainer.publish_version(first)
    trainer.publish_version({**first, "labels": np.array(["a", "c"]), "phases": np.array([4 + 5j])})
    trainer.publish_version({**first, "states": np.array([1])})
    compared = answer(run, "diff", "0", "1")
    assert {t["tensor"]: (t["changed"], t["max_abs_difference"]) for t in compared["tensors"]} == {
        "labels": (1, None),
        "phases": (1, 5.0),
        "states": (0, None),
    }
    assert answer(run, "diff", "0", "2")["not_compared"] == ["states"]
    where = ("--run", run.name, "-b", run.kafka.bootstrap_servers)
    shown = answer_of(run.directory, "weights", "diff", "0", "1", *where).stdout.splitlines()
    assert shown[1].split() == ["labels", "str32", "2", "50.00", "%", "-"]
    assert shown[-1] == "together: 50.00 % of 4 values changed, by 5 at most"


def test_a_version_that_was_committed_just_before_is_listed_and_one_that_stays_open_is_not(
    run: RealRun, trainer: StepWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.publish_version(parameters(0))
    manifest = visible_manifests(run, 0)[0]
    producer = clients.transactional_producer(run.kafka, f"{run.name}-later")
    producer.init_transactions(120)
    producer.begin_transaction()
    producer.produce(run.topic("policies"), encode(replace(manifest, version=1)), encode_key(1))
    producer.flush(120)
    config = RunConfig(run=run.name, kafka=run.kafka)
    assert PublishedVersions(config).by_number.keys() == {0}
    looks = committed_at_second_look(producer, monkeypatch)
    assert PublishedVersions(config).by_number.keys() == {0, 1}
    assert len(looks) > 1


def test_a_list_of_versions_holds_no_tensors_except_of_the_versions_asked_for(
    run: RealRun, trainer: StepWriter
) -> None:
    for version in range(3):
        trainer.publish_version(parameters(version))
    visible_manifests(run, 2)
    published = PublishedVersions(RunConfig(run=run.name, kafka=run.kafka), whole=[1])
    assert [bool(version.manifest.tensors) for version in published.by_number.values()] == [False, True, False]
    assert [bool(version.manifest.chunks) for version in published.by_number.values()] == [False, True, False]
    assert {(version.chunks, version.dtypes) for version in published.by_number.values()} == {(1, "<f4")}
    # A version that is published after the list was made is not in it.
    trainer.publish_version(parameters(3))
    assert published.chunk_states() == dict.fromkeys(range(3), "there")


def test_adapters_are_merged_into_the_checkpoint_that_is_pulled(run: RealRun, tmp_path: Path) -> None:
    model = replace(MODEL, lora=LoraConfig(rank=2))
    arrays = {**parameters(0), **published_exactly(random_parameters(model))}
    with StepWriter(run.kafka, run.name, model=json.dumps(asdict(model))) as trainer:
        trainer.publish_version(arrays)
    pulled = answer(run, "export", "0", "-o", str(tmp_path))
    expected = published_exactly(merged(model, arrays))
    loaded = huggingface.load(pulled["path"])
    assert loaded.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(loaded[name].astype(np.float32), array, rtol=2**-7, err_msg=name)
    changed = "model.layers.0.self_attn.q_proj.weight"
    assert np.abs(expected[changed] - arrays[changed]).max() > 0.01
    pulled = answer(run, "export", "0", "-o", str(tmp_path / "apart"), "--format", "published")
    assert Path(pulled["path"]).name == "version-0.safetensors"
    stored = safetensors_files.read(Path(pulled["path"]))
    assert params_digest(stored) == pulled["digest"]
    assert stored.keys() == arrays.keys()


def test_parameters_of_no_model_are_pulled_as_tensors(run: RealRun, tmp_path: Path) -> None:
    with StepWriter(run.kafka, run.name) as trainer:
        trainer.publish_version({"dense": {"kernel": np.ones((2, 3), np.float32)}})
        trainer.publish_version({"file": np.ones(3, np.float32)})
    pulled = answer(run, "export", "0", "-o", str(tmp_path))
    [(name, array)] = safetensors_files.read(Path(pulled["path"])).items()
    assert (name, array.astype(np.float32).tolist()) == ("dense/kernel", [[1.0] * 3] * 2)
    pulled = answer(run, "export", "1", "-o", str(tmp_path), "--format", "npz")
    with np.load(pulled["path"], allow_pickle=False) as stored:
        assert {name: array.tolist() for name, array in stored.items()} == {"file": [1.0] * 3}


@pytest.mark.parametrize("anchor_every", [1, 10])
def test_verify_names_what_is_damaged_and_what_is_missing_and_fails(run: RealRun, anchor_every: int) -> None:
    log = StepLog(run.kafka, run.name, "trainer")
    config = WeightsConfig(chunk_bytes=1000, keep_versions=9, anchor_every=anchor_every)
    publisher = WeightsPublisher(run.kafka, run.name, "trainer", MODEL_JSON, config)

    def commit(manifest: PolicyManifest) -> None:
        log.commit([publisher.record(manifest)])
        publisher.committed(manifest)

    for step in range(2):
        commit(publisher.stage(step, parameters(step)))
    assert [entry["result"] for entry in answer(run, "verify")] == ["whole", "whole"]

    commit(replace(publisher.stage(2, parameters(2)), digest="0" * 64))
    lost = publisher.stage(3, parameters(3))
    first = publisher.manifest(0)
    assert first is not None
    elsewhere = replace(lost.chunks[-1], partition=first.chunks[0].partition, offset=first.chunks[0].offset)
    commit(replace(lost, chunks=(*lost.chunks[:-1], elsewhere)))
    commit(publisher.stage_external(4, "d"))
    log.close()
    publisher.close()

    completed = weights(run, "verify")
    assert completed.returncode == 1
    results = [entry["result"].split(":")[0] for entry in json.loads(completed.stdout)]
    assert results == ["whole", "whole", "damaged", "missing", "not on the log"]
    sound = run.said("weights", "verify", "0", "1")
    assert (sound.returncode, sound.stdout.splitlines()[-1][:15]) == (0, "2 of 2 versions")
    unfetched = weights(run, "export", "2", "-o", "out")
    assert unfetched.returncode == 2
    assert "differs from its manifest" in unfetched.stderr
    assert not (run.directory / "out").exists()


def test_verify_fails_if_the_newest_version_cannot_be_read(run: RealRun, trainer: StepWriter) -> None:
    trainer.publish_version(parameters(0))
    assert answer(run, "verify")[0]["result"] == "whole"
    run.send_bytes("policies", b"of a newer release", encode_key(1), 0)
    completed = weights(run, "verify")
    assert completed.returncode == 1
    assert [(entry["version"], entry["result"].split(":")[0]) for entry in json.loads(completed.stdout)] == [
        (0, "whole"),
        (1, "unread"),
    ]
    assert weights(run, "verify", "0").returncode == 0


def test_versions_no_longer_kept_are_no_fault(run: RealRun) -> None:
    log = StepLog(run.kafka, run.name, "trainer")
    config = WeightsConfig(keep_versions=1, anchor_every=1)
    publisher = WeightsPublisher(run.kafka, run.name, "trainer", MODEL_JSON, config)
    for step in range(2):
        manifest = publisher.stage(step, parameters(step))
        log.commit([publisher.record(manifest)])
        publisher.committed(manifest)
    publisher.close()
    log.close()
    first, second = answer(run, "ls")
    assert first["chunks_state"] in ("expiring", "gone")
    assert second["chunks_state"] == "there"
    results = answer(run, "verify", "--set=learner.weights.keep_versions=1")
    assert results[0]["result"] in ("whole", "no longer kept")
    assert results[1]["result"] == "whole"


def test_versions_that_a_learner_removes_while_they_are_verified_are_no_fault(
    run: RealRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = str(run.directory / "weights")
    config = WeightsConfig(keep_versions=1, anchor_every=1, url=url, transport="files", fetch_timeout_s=2.0)

    class SlowFetcher(ChunkFetcher):
        """A fetcher that is ready once the learner has published another version."""

        def __init__(self, *settings: Any, **more: Any) -> None:
            super().__init__(*settings, **more)
            trainer.publish_version(parameters(2))

    monkeypatch.setattr(weights_tool, "ChunkFetcher", SlowFetcher)
    settings = RunConfig(run=run.name, kafka=run.kafka, learner=LearnerConfig(weights=config))
    with StepWriter(run.kafka, run.name, model=MODEL_JSON, config=config) as trainer:
        trainer.publish_version(parameters(1))
        code = weights_tool.verify_versions(settings, argparse.Namespace(version=[], json=True))
        out = json.loads(capsys.readouterr().out)
        assert (code, out) == (0, [{"version": 0, "result": "no longer kept"}])
        # A version that must be there is still a fault.
        shutil.rmtree(run.directory / "weights")
        monkeypatch.undo()
        assert weights_tool.verify_versions(settings, argparse.Namespace(version=[], json=True)) == 1


def test_versions_in_a_directory_that_is_not_mounted_here_are_unlisted_and_not_gone(run: RealRun) -> None:
    directory = run.directory / "weights"
    config = WeightsConfig(keep_versions=1, anchor_every=1, transport="files", url=str(directory))
    with StepWriter(run.kafka, run.name, model=MODEL_JSON, config=config) as trainer:
        for version in range(3):
            trainer.publish_version(parameters(version))
    assert [entry["chunks_state"] for entry in answer(run, "ls")] == ["gone", "gone", "there"]
    elsewhere = directory.rename(run.directory / "elsewhere")
    assert [entry["chunks_state"] for entry in answer(run, "ls")] == ["unlisted"] * 3
    unread = weights(run, "verify", "--set=learner.weights.fetch_timeout_s=1")
    assert unread.returncode == 1
    assert [entry["result"].partition(":")[0] for entry in json.loads(unread.stdout)] == ["unread"] * 3
    # The directory of a mount point is there, but empty.
    directory.mkdir()
    assert [entry["chunks_state"] for entry in answer(run, "ls")] == ["unlisted"] * 3
    directory.rmdir()
    elsewhere.rename(directory)
    assert [entry["chunks_state"] for entry in answer(run, "ls")] == ["gone", "gone", "there"]


@pytest.mark.parametrize("transport", ["log", "files"])
def test_a_rollback_with_other_settings_than_the_learner_removes_no_version(
    run: RealRun, transport: Literal["log", "files"]
) -> None:
    versions = 2 * WeightsConfig().keep_versions
    url = str(run.directory / "weights") if transport == "files" else ""
    config = WeightsConfig(keep_versions=2 * versions, anchor_every=1, transport=transport, url=url)
    with StepWriter(run.kafka, run.name, model=MODEL_JSON, config=config) as trainer:
        for version in range(versions):
            trainer.publish_version(parameters(version))
    where = [f"--set=learner.weights.{name}={value}" for name, value in (("transport", transport), ("url", url))]
    answer(run, "rollback", "1", "--reason", "reward hacking", "--take-over", *where)
    states = {version["version"]: version["chunks_state"] for version in answer(run, "ls")}
    assert states == dict.fromkeys(range(versions + 1), "there")


def test_a_rollback_without_settings_stores_a_version_where_its_files_are(run: RealRun) -> None:
    url = str(run.directory / "weights")
    config = WeightsConfig(transport="files", url=url)
    with StepWriter(run.kafka, run.name, model=MODEL_JSON, config=config) as trainer:
        for version in range(2):
            trainer.publish_version(parameters(version))
    answer(run, "rollback", "0", "--reason", "reward hacking", "--take-over")
    assert all(chunk.url.startswith(f"{url}/{run.name}/") for chunk in visible_manifests(run, 2)[2].chunks)
    assert not list(read_to_end(run.kafka, run.topic("weights"), isolation="read_uncommitted"))
    with WeightsFollower(run.kafka, run.name) as follower:
        version, arrays = follower.wait_for(2, 300)
        assert (version, values_digest(arrays)) == (2, values_digest(parameters(0)))


def test_a_rollback_to_a_version_that_is_gone_names_what_is_kept_and_does_not_advise_itself(run: RealRun) -> None:
    config = WeightsConfig(keep_versions=1, anchor_every=1, transport="files", url=str(run.directory / "weights"))
    with StepWriter(run.kafka, run.name, model=MODEL_JSON, config=config) as trainer:
        for version in range(3):
            trainer.publish_version(parameters(version))
    words = ("rollback", "0", "--reason", "reward hacking", "--take-over", "--set=learner.weights.keep_versions=1")
    refused = weights(run, *words)
    assert refused.returncode == 2
    assert "are missing. Other versions that are kept with learner.weights.keep_versions 1: 2; " in refused.stderr
    assert "rollstream fork" in refused.stderr
    assert "weights rollback" not in refused.stderr
    assert len(answer(run, "ls")) == 3


def test_a_rollback_is_refused_while_a_learner_publishes_and_fences_it_if_told_to(
    run: RealRun, trainer: StepWriter
) -> None:
    for version in range(3):
        trainer.publish_version(parameters(version))
    refused = weights(run, "rollback", "0", "--reason", "reward hacking")
    assert refused.returncode == 2
    assert "learner 'trainer' publishes into run" in refused.stderr
    assert len(answer(run, "ls")) == 3

    words = ("rollback", "0", "--reason", "reward hacking", "--by", "somebody", "--take-over")
    assert answer(run, *words) == {"run": run.name, "policy_version": 3, "rollback_of": 0}
    newest = answer(run, "ls")[-1]
    assert newest["rollback"] == {"source": 0, "by": "somebody", "reason": "reward hacking"}
    with WeightsFollower(run.kafka, run.name) as follower:
        version, arrays = follower.wait_for(3, 300)
        assert (version, values_digest(arrays)) == (3, values_digest(parameters(0)))
    with pytest.raises(Fenced):
        trainer.publish_version(parameters(5))
    # A trainer that starts again goes on from its own state; no number is used twice.
    with StepWriter(run.kafka, run.name, model=MODEL_JSON) as again:
        assert again.publish_version(parameters(6)) == 4
