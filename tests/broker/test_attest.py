"""Attestations of a run on a real broker: checked from the archive alone, and refused by name after every forgery."""

import json
import subprocess
from pathlib import Path

import pytest

from rollstream.topics.wire.signatures import write_key
from tests.support.attested_run import GROUPS, STEPS, trained_run
from tests.support.command_line import answer_of
from tests.support.forged_archives import forged, forgeries
from tests.support.planted import end
from tests.support.runs import RealRun, rollout
from tests.support.settled import settled

NOWHERE = ("-b", "127.0.0.1:1")
"""An address without a broker: checks need none."""


def attest(directory: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return answer_of(directory, "attest", *words, *NOWHERE)


@pytest.mark.long
def test_an_archive_is_attested_and_whatever_is_changed_is_refused_by_name(real_run: RealRun) -> None:
    run = trained_run(real_run)
    here, archive = run.directory, run.directory / "archive"
    assert answer_of(here, *run.command("archive", str(archive))[4:]).returncode == 0
    keys = [write_key(here / f"{name}.pem") for name in ("attest", "other")]

    def sign(archive: Path, statement: str) -> "subprocess.CompletedProcess[str]":
        words = ("sign", "--run", run.name, "--signing-key", "attest.pem", "-o", statement, "--archive", str(archive))
        return attest(here, *words)

    made = sign(archive, "run.json")
    assert made.returncode == 0, made.stderr
    assert f"{STEPS} steps on exactly {32 * STEPS} rollouts" in made.stdout

    # A third party has the archive, the statement and the public key.
    def check(archive: Path, statement: str = "run.json", key: str = keys[0]) -> "subprocess.CompletedProcess[str]":
        return attest(here, "check", statement, "--key", key, "--archive", str(archive), "--json")

    whole = check(archive)
    assert whole.returncode == 0, whole.stderr + whole.stdout
    answer = json.loads(whole.stdout)
    batches = answer["trees"]["batches"]["entries"]
    assert (answer["holds"], answer["folded"]) == (True, batches)
    assert answer["records"]["batched"] == 4 * GROUPS
    assert (answer["records"]["dropped:zero_variance"], answer["records"]["in_flight"]) == (8, 1)
    assert sum(answer["records"].values()) == answer["trees"]["rollouts"]["entries"]
    assert answer["trained"] == {"steps": STEPS, "trained": 32 * STEPS, "trained_again": 0, "skipped": 0}

    policy = str(answer["policy"]["version"])
    assert answer_of(here, *run.command("weights", "export", policy, "-o", "model")[4:]).returncode == 0
    words = ("check", "run.json", "--key", keys[0], "--archive", str(archive), "--model", "model")
    assert attest(here, *words).returncode == 0
    tensors = here / "model" / "model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1] + bytes([tensors.read_bytes()[-1] ^ 1]))
    other_model = attest(here, *words)
    assert (other_model.returncode, "does not hold policy version" in other_model.stderr) == (1, True)

    trained, open_group, dropped = proofs(here, archive, keys[0])
    assert trained["trained_by"][0][0] == "default"
    assert (trained["fate"], trained["in_policy"], trained["version"]) == ("batched", True, trained["trained_by"][0][1])
    assert (open_group["fate"], open_group["trained_by"], open_group["in_policy"]) == ("in_flight", [], False)
    assert (dropped["fate"], dropped["batch"]) == ("dropped:zero_variance", "")

    refused = check(archive, key=keys[1])
    assert (refused.returncode, "is signed with key" in refused.stderr) == (2, True)
    text = (here / "run.json").read_text()
    (here / "edited.json").write_text(text.replace('"trained": 64', '"trained": 96'))
    edited = check(archive, "edited.json")
    assert (edited.returncode, "it was changed after signing" in edited.stderr) == (2, True)

    # The run and its archive go on; the statement still covers the same records.
    grouper = run.start("group")
    run.send(rollout(f"y{n}", member) for n in range(4) for member in range(4))
    settled(run, batched=4 * GROUPS + 16)
    end(grouper)
    assert answer_of(here, *run.command("archive", str(archive))[4:]).returncode == 0
    later = check(archive)
    assert later.returncode == 0, later.stdout
    assert json.loads(later.stdout)["records"] == answer["records"]

    broken = forged(archive, run.name, here / "broken", lambda entry: [entry])
    assert check(broken).returncode == 0
    file = next(iter((broken / f"run={run.name}" / "table=log").rglob("rollouts-*.parquet")))
    file.write_bytes(file.read_bytes()[:-9] + b"x" + file.read_bytes()[-8:])
    damaged = check(broken)
    assert (damaged.returncode, file.name in damaged.stderr) == (2, True), damaged.stderr

    for name, forgery in forgeries(trained="x3-1", dropped="same1-2").items():
        other = forged(archive, run.name, here / name, forgery.forge)
        answer = check(other)
        assert answer.returncode == 1, (name, answer.stdout, answer.stderr)
        problems = json.loads(answer.stdout)["problems"]
        assert any(forgery.problem in text for text in problems), (name, problems)
        again = sign(other, "forged.json")
        assert again.returncode == (2 if forgery.contradicts else 0), (name, again.stderr)


def proofs(here: Path, archive: Path, key: str) -> list[dict[str, object]]:
    """The content of proofs of three rollouts, each checked without the archive; changed ones are refused."""
    answers = []
    for uid in ("x3-1", "open-0", "same1-2"):
        words = ("prove", "run.json", uid, "--key", key, "-o", f"{uid}.json", "--archive", str(archive))
        made = attest(here, *words)
        assert made.returncode == 0, made.stderr
        words = ("check", "run.json", "--proof", f"{uid}.json", "--key", key, "--json", "--archive", "nowhere")
        checked = attest(here, *words)
        assert checked.returncode == 0, checked.stderr
        answers.append(json.loads(checked.stdout))
        proof = json.loads((here / f"{uid}.json").read_text())
        proof["rollout"]["leaf"]["uid"] = "another"
        (here / "forged.json").write_text(json.dumps(proof))
        refused = attest(here, "check", "run.json", "--proof", "forged.json", "--key", key)
        assert (refused.returncode, "the proof is invalid" in refused.stderr) == (1, True)
    assert [answer["uid"] for answer in answers] == ["x3-1", "open-0", "same1-2"]
    return answers
