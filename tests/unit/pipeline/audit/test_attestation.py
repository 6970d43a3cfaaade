"""Attestations without a broker: what a statement says, what a proof shows, and which changes are noticed."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rollstream.consumers.archive.tables import ArchivedRecord
from rollstream.consumers.files import safetensors_files
from rollstream.consumers.models.adapters import save_merged
from rollstream.consumers.models.config import LoraConfig
from rollstream.pipeline.audit.attestation.archive_cut import ArchiveCut
from rollstream.pipeline.audit.attestation.evidence import Evidence, evidence_of
from rollstream.pipeline.audit.attestation.rollout_proof import RolloutEntries, RolloutProof, fate_in, proof_of
from rollstream.pipeline.audit.attestation.statement import Statement, differences, opened, signed, statement_of
from rollstream.pipeline.command_line.cli import main
from rollstream.pipeline.tools.attest import proof_text
from rollstream.topics.errors import ConfigurationError, StateRefused
from rollstream.topics.files.stores import open_store
from rollstream.topics.records import JournalRecord, LearnerStep, PolicyManifest
from rollstream.topics.wire.codec import decode, decode_as, encode
from rollstream.topics.wire.params_digest import params_digest
from rollstream.topics.wire.signatures import Signer, write_key
from tests.support.attested_run import MADE_GROUPS, STEPS, made_archive
from tests.support.checkpoints import random_parameters
from tests.support.forged_archives import Forge, forged, forgeries
from tests.support.serving_engines import MODEL

FORGERIES = forgeries(trained="0x1-2", dropped="1same-2")


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_archive(tmp_path_factory.mktemp("archive"))


@pytest.fixture(scope="module")
def signer(tmp_path_factory: pytest.TempPathFactory) -> Signer:
    path = tmp_path_factory.mktemp("keys") / "attest.pem"
    write_key(path)
    return Signer(f"file:{path}", "signing_key")


def judged(archive: Path, statement: Statement | None = None) -> tuple[ArchiveCut, Evidence]:
    cut = ArchiveCut(open_store(str(archive)), "main", statement.ends if statement else None)
    return cut, evidence_of(cut)


def attested(archive: Path, key: str = "k", statement: Statement | None = None) -> Statement:
    return statement_of(*judged(archive, statement), key)


def test_a_statement_counts_every_record_once(archive: Path) -> None:
    cut, evidence = judged(archive)
    statement = statement_of(cut, evidence, "k")
    batched = 2 * 4 * MADE_GROUPS
    assert statement.records == {
        "batched": batched,
        "dead_lettered": 2,
        "dropped:zero_variance": 8,
        "in_flight": 2,
    }
    assert {name: tree.entries for name, tree in statement.trees.items()} == {
        "rollouts": batched + 12,
        "batches": 2 * MADE_GROUPS,
        "steps": STEPS + 1,
        "versions": STEPS + 1,
    }
    assert evidence.folded == 2 * MADE_GROUPS
    assert statement.trained == {"steps": STEPS, "trained": 8 * STEPS, "trained_again": 0, "skipped": 0}
    assert (statement.policy["version"], statement.policy["digest"]) == (STEPS, f"d{STEPS}")
    earlier = statement_of(cut, evidence, "k", 1)
    assert (earlier.policy["version"], earlier.trained["trained"]) == (1, 8)
    with pytest.raises(ConfigurationError, match="no policy version 9 in the archive; it has 0 to 2"):
        statement_of(cut, evidence, "k", 9)


def test_a_statement_holds_for_a_later_archive_of_the_run(archive: Path, tmp_path: Path) -> None:
    shorter = attested(made_archive(tmp_path / "shorter", steps=1))
    # The same records; the later archive has a step and a version more.
    assert differences(shorter, *judged(archive, shorter)) == []
    with pytest.raises(StateRefused, match="covers the records up to"):
        attested(tmp_path / "shorter", statement=attested(archive))


@pytest.mark.parametrize("name", FORGERIES)
def test_a_change_of_the_archive_is_named(name: str, archive: Path, tmp_path: Path) -> None:
    forgery, statement = FORGERIES[name], attested(archive)
    cut, evidence = judged(forged(archive, "main", tmp_path / "forged", forgery.forge), statement)
    if forgery.contradicts:
        assert any(forgery.problem in problem for problem in evidence.problems), evidence.problems
        with pytest.raises(StateRefused, match="run main is not attested"):
            statement_of(cut, evidence, "k")
    else:
        assert evidence.problems == []
        assert forgery.problem in differences(statement, cut, evidence)[0]


def with_another_step(entry: ArchivedRecord) -> list[ArchivedRecord]:
    """Give the step of the newest policy version other parameters."""
    return with_params_digest("steps", STEPS, entry)


def with_another_version(entry: ArchivedRecord) -> list[ArchivedRecord]:
    """Give the newest policy version other parameters."""
    return with_params_digest("policies", STEPS, entry)


def with_params_digest(topic: str, number: int, entry: ArchivedRecord) -> list[ArchivedRecord]:
    if (entry.topic, entry.offset) != (topic, number):
        return [entry]
    record = decode(entry.value)
    assert isinstance(record, LearnerStep | PolicyManifest)
    return [entry._replace(value=encode(replace(record, params_digest="other")))]


def without_version(entry: ArchivedRecord) -> list[ArchivedRecord]:
    return [] if (entry.topic, entry.offset) == ("policies", STEPS) else [entry]


def without_step(entry: ArchivedRecord) -> list[ArchivedRecord]:
    return [] if (entry.topic, entry.offset) == ("steps", STEPS) else [entry]


OF_THE_VERSION = {
    with_another_step: f"policy version {STEPS} has other parameters than there were after step {STEPS}",
    with_another_version: f"policy version {STEPS} has other parameters than there were after step {STEPS}",
    without_version: f"policy version {STEPS} is not in the archive; compaction may have removed it",
    without_step: f"after step {STEPS} of learner default, which is not in the archive; compaction may have removed it",
}


@pytest.mark.parametrize("forge", OF_THE_VERSION)
def test_what_contradicts_the_policy_version_itself_is_a_difference(
    forge: Forge, archive: Path, signer: Signer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.json").write_text(signed(attested(archive, signer.public), signer))
    changed = forged(archive, "main", tmp_path / "forged", forge)
    words = ["check", str(tmp_path / "run.json"), "--key", signer.public, "--archive", str(changed), "--json"]
    assert main(["attest", *words]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert not answer["holds"]
    assert OF_THE_VERSION[forge] in answer["problems"][0]
    assert "--policy" not in "".join(answer["problems"])
    assert any(problem.startswith(("steps: ", "versions: ")) for problem in answer["problems"])


def test_a_statement_that_was_changed_is_not_opened(archive: Path, signer: Signer, tmp_path: Path) -> None:
    statement = attested(archive, signer.public)
    text = signed(statement, signer)
    assert opened(text, signer.public) == statement
    values = json.loads(text)

    def changes() -> list[dict[str, object]]:
        others = [{**values, "trained": {**values["trained"], "trained": 99}}, {**values, "made": "never"}]
        root = {**values["trees"]["rollouts"], "root": "00" * 32}
        others.append({**values, "trees": {**values["trees"], "rollouts": root}})
        others.append({**values, "more": 1})
        return others

    for changed in changes():
        with pytest.raises(StateRefused, match="it was changed after signing"):
            opened(json.dumps(changed), signer.public)
    write_key(tmp_path / "other.pem")
    other = Signer(f"file:{tmp_path / 'other.pem'}", "signing_key")
    with pytest.raises(StateRefused, match="is signed with key"):
        opened(text, other.public)
    with pytest.raises(StateRefused, match="it was changed after signing"):
        opened(json.dumps({**values, "key": other.public}), other.public)
    with pytest.raises(StateRefused, match="it was changed after signing"):
        opened(signed(statement, other), signer.public)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "rollstream %s 1"}', "nonsense"])
def test_bytes_that_are_no_statement_and_no_proof_are_refused(text: str) -> None:
    with pytest.raises(StateRefused, match="this is not a statement"):
        opened(text.replace("%s", "attestation"), "00" * 32)
    with pytest.raises(StateRefused, match="this is not a proof"):
        RolloutProof.from_json(text.replace("%s", "proof"))


def proof(archive: Path, uid: str) -> tuple[Statement, RolloutProof]:
    entries, cut = RolloutEntries(uid), ArchiveCut(open_store(str(archive)), "main")
    evidence = evidence_of(cut, on_rollout=entries)
    statement = statement_of(cut, evidence, "k")
    return statement, proof_of(statement, evidence, entries)


def test_a_proof_shows_what_became_of_a_rollout(archive: Path) -> None:
    statement, shown = proof(archive, "0x1-2")
    assert RolloutProof.from_json(shown.to_json()) == shown
    answer = fate_in(statement, shown)
    trained = {"fate": "batched", "batch": "0-1", "row": 2, "trained_by": [["default", 2]], "version": 2}
    assert answer.items() >= {**trained, "uid": "0x1-2", "place": "0:6", "in_policy": True}.items()
    expected = {
        "0x4-0": ("batched", "0-4", [], None, None),
        "1same-1": ("dropped:zero_variance", "", [], None, False),
        "0open-0": ("in_flight", "", [], None, False),
    }
    for uid, values in expected.items():
        answer = fate_in(*proof(archive, uid))
        assert tuple(answer[name] for name in ("fate", "batch", "trained_by", "version", "in_policy")) == values
    with pytest.raises(ConfigurationError, match="no rollout 'nobody' is in the part of the archive"):
        proof(archive, "nobody")


def test_a_proof_without_its_steps_does_not_show_that_none_trained_on_the_rollout(archive: Path) -> None:
    statement, shown = proof(archive, "0x1-2")
    answer = fate_in(statement, replace(shown, steps=(), version=None))
    assert (answer["trained_by"], answer["in_policy"]) == ([], None)
    text = proof_text(statement, answer)
    assert text.endswith("the proof shows no step of policy version 2 that trained on it")
    assert "it is among the rollouts" in proof_text(statement, fate_in(statement, shown))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_part_of_a_proof_can_be_changed(data: st.DataObject, proved: tuple[Statement, RolloutProof]) -> None:
    statement, shown = proved
    values = json.loads(shown.to_json())
    places = list(_places(values))
    *path, last = data.draw(st.sampled_from(places))
    at = values
    for key in path:
        at = at[key]
    at[last] = data.draw(st.sampled_from([0, 5, "", "00" * 32, "0-0", None, [], True]).filter(lambda v: v != at[last]))
    if json.loads(json.dumps(values)) == json.loads(shown.to_json()):
        return
    with pytest.raises(StateRefused):
        fate_in(statement, RolloutProof.from_json(json.dumps(values)))


@pytest.fixture(scope="module")
def proved(archive: Path) -> tuple[Statement, RolloutProof]:
    return proof(archive, "0x1-2")


def _places(value: object, path: tuple[object, ...] = ()) -> "list[tuple[object, ...]]":
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    inner = [place for key, item in pairs for place in _places(item, (*path, key))]
    return inner or ([path] if path else [])


def test_a_step_or_a_version_of_another_rollout_proves_nothing(archive: Path) -> None:
    statement, shown = proof(archive, "0x1-2")
    _statement, other = proof(archive, "0x0-2")
    with pytest.raises(StateRefused, match="step 1 in the proof does not use the rollout"):
        fate_in(statement, replace(shown, steps=other.steps))
    with pytest.raises(StateRefused, match="shows batch 0-0, but the rollout is in 0-1"):
        fate_in(statement, replace(shown, batch=other.batch))
    with pytest.raises(StateRefused, match="version 1 in the proof includes none of the steps"):
        fate_in(statement, replace(shown, version=other.version))
    with pytest.raises(StateRefused, match="belongs to another statement"):
        fate_in(replace(statement, made="later"), shown)


def test_a_check_tells_what_is_false_from_what_cannot_be_checked(
    archive: Path, signer: Signer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    entries, cut = RolloutEntries("0x1-2"), ArchiveCut(open_store(str(archive)), "main")
    evidence = evidence_of(cut, on_rollout=entries)
    statement = statement_of(cut, evidence, signer.public)
    shown = proof_of(statement, evidence, entries)
    uid = {**shown.rollout.leaf, "uid": "another"}
    forged_proof = replace(shown, rollout=replace(shown.rollout, leaf=uid))
    safetensors_files.write(tmp_path / "model.safetensors", {"w": np.zeros(2, np.float32)})
    files = {
        "run.json": signed(statement, signer),
        "proof.json": shown.to_json(),
        "forged.json": forged_proof.to_json(),
        "none.json": "{}",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    def check(code: int, message: str, *words: str) -> None:
        assert main(["attest", "check", "run.json", "--key", signer.public, *words]) == code
        assert message in capsys.readouterr().err

    check(0, "", "--proof", "proof.json")
    check(1, "the proof is invalid", "--proof", "forged.json")
    check(1, "does not hold policy version", "--proof", "proof.json", "--model", "model.safetensors")
    check(2, "this is not a proof", "--proof", "none.json")


def test_only_the_tensors_that_every_program_loads_are_the_model(
    archive: Path, signer: Signer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = {name: np.full(4, value, np.float32) for value, name in enumerate(("a", "b"))}
    check = checking(archive, signer, tmp_path, capsys, digest=params_digest(tensors))

    def folder(name: str, **files: dict[str, NDArray[np.float32]]) -> Path:
        for file, arrays in files.items():
            safetensors_files.write(tmp_path / name / f"{file}.safetensors", arrays)
        return tmp_path / name

    others = {name: array + 1 for name, array in tensors.items()}
    halves = [{name: array} for name, array in tensors.items()]
    index = json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}})

    assert check(folder("alone", version=tensors)) == (0, "")
    sharded = folder("sharded", one=halves[0], two=halves[1])
    assert check(sharded) == (0, "")
    (sharded / "model.safetensors.index.json").write_text(index)
    assert check(sharded) == (0, "")
    code, message = check(folder("hidden", model=others, zz=tensors))
    assert (code, "has tensor" in message, "in model.safetensors and in zz.safetensors" in message) == (2, True, True)
    code, message = check(folder("half", model=halves[0], zz=halves[1]))
    assert (code, "its 1 tensors have digest" in message) == (1, True)
    folder("sharded", model={"c": tensors["a"]})
    code, message = check(sharded)
    assert (code, "has model.safetensors and model.safetensors.index.json" in message) == (2, True)
    (tmp_path / "empty").mkdir()
    code, message = check(tmp_path / "empty")
    assert (code, "has no safetensors file" in message) == (2, True)


def test_a_model_with_merged_adapters_is_not_taken_for_another_model(
    archive: Path, signer: Signer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = replace(MODEL, lora=LoraConfig(rank=2))
    arrays = random_parameters(model)
    check = checking(archive, signer, tmp_path, capsys, digest=params_digest(arrays), model=json.dumps(asdict(model)))
    save_merged(tmp_path / "merged", model, arrays)
    code, message = check(tmp_path / "merged")
    assert (code, "cannot be compared with policy version 2, which has adapters" in message) == (2, True)
    assert "weights export 2 -o DIR --run main --format published" in message
    safetensors_files.write(tmp_path / "version-2.safetensors", arrays)
    assert check(tmp_path / "version-2.safetensors") == (0, "")
    changed = {**arrays, "model.norm.weight": arrays["model.norm.weight"] + 1}
    safetensors_files.write(tmp_path / "version-2.safetensors", changed)
    assert check(tmp_path / "version-2.safetensors")[0] == 1


def checking(
    archive: Path, signer: Signer, directory: Path, capsys: pytest.CaptureFixture[str], **changes: Any
) -> Callable[[Path], tuple[int, str]]:
    """A function that compares a model with the statement about an archive whose policy versions were changed."""

    def forge(entry: ArchivedRecord) -> list[ArchivedRecord]:
        if entry.topic != "policies":
            return [entry]
        return [entry._replace(value=encode(replace(decode_as(PolicyManifest, entry.value), **changes)))]

    changed = forged(archive, "main", directory / "archive", forge)
    (directory / "run.json").write_text(signed(attested(changed, signer.public), signer))
    words = ["attest", "check", str(directory / "run.json"), "--key", signer.public, "--archive", str(changed)]

    def check(path: Path) -> tuple[int, str]:
        code = main([*words, "--model", str(path)])
        return code, capsys.readouterr().err

    return check


def test_an_archive_that_begins_later_or_lacks_the_run_is_refused(archive: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds no archive of run other; runs there: main"):
        ArchiveCut(open_store(str(archive)), "other")


def changed_journal(archive: Path, into: Path, change: Callable[[JournalRecord], JournalRecord | None]) -> Path:
    """An archive whose journal of partition 0 was changed, or partly left out."""

    def forge(entry: ArchivedRecord) -> list[ArchivedRecord]:
        if (entry.topic, entry.partition) != ("journal", 0):
            return [entry]
        record = change(decode_as(JournalRecord, entry.value))
        return [] if record is None else [entry._replace(value=encode(record))]

    return forged(archive, "main", into, forge)


def test_a_journal_that_begins_later_or_tells_of_what_is_not_there_is_refused(archive: Path, tmp_path: Path) -> None:
    far = np.array([1 << 40, 1 << 20], "<i8")
    changes: list[Callable[[JournalRecord], JournalRecord | None]] = [
        lambda record: record if record.sequence else None,
        lambda record: replace(record, admitted=far) if record.sequence == 1 else record,
        lambda record: replace(record, position=1 << 60) if record.sequence == 1 else record,
    ]
    for number, change in enumerate(changes):
        with pytest.raises(StateRefused, match="is not about the archived records of rollouts from their beginning"):
            judged(changed_journal(archive, tmp_path / str(number), change))


def test_a_learner_of_the_batches_of_another_run_is_refused(archive: Path, tmp_path: Path) -> None:
    def forge(entry: ArchivedRecord) -> list[ArchivedRecord]:
        if entry.topic != "steps":
            return [entry]
        step = decode_as(LearnerStep, entry.value)
        return [entry._replace(value=encode(replace(step, input_run="other" if step.step == 1 else "main")))]

    with pytest.raises(StateRefused, match="step 1 of learner default of run main used batches of run other"):
        judged(forged(archive, "main", tmp_path / "forged", forge))
