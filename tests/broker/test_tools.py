"""Tools on a run with planted facts: each finds what was planted, names it, and finds nothing else."""

import json
import subprocess
from typing import Any

import pytest

from pipeline.ledger import ledger
from tests.planted import GOOD, POISON, Planted, check, plant
from tests.runs import RealRun
from topics.config import KafkaConfig


@pytest.fixture(scope="module")
def planted(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    run = RealRun(KafkaConfig(bootstrap_servers=broker), "planted", tmp_path_factory.mktemp("planted"))
    try:
        yield plant(run)
    finally:
        run.stop()


def rollstream(planted: Planted, *words: str) -> subprocess.CompletedProcess[str]:
    run = planted.run
    return subprocess.run(
        [*run.command(*words)], cwd=run.directory, env=run._env(), capture_output=True, text=True, timeout=90
    )


def lines(planted: Planted, *words: str) -> list[str]:
    found = rollstream(planted, *words)
    assert found.returncode == 0, found.stderr
    return found.stdout.splitlines()


def answer(planted: Planted, *words: str) -> Any:
    return json.loads("\n".join(lines(planted, *words, "--json")))


def records(planted: Planted, *words: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines(planted, "cat", *words, "--json")]


def test_the_ledger_names_what_was_planted(planted: Planted) -> None:
    check(ledger(planted.run.kafka, planted.run.name))


# ---------------------------------------------------------------------- cat


def test_cat_prints_every_record_decoded_in_the_order_of_its_partition(planted: Planted) -> None:
    found = records(planted, "rollouts")
    assert len(found) == ledger(planted.run.kafka, planted.run.name).produced
    for partition in range(2):
        offsets = [r["offset"] for r in found if r["partition"] == partition]
        assert offsets == sorted(offsets)
    kinds = {r["type"] for r in found}
    assert kinds == {"Rollout", "GroupCancelled", "Mark", ""}
    [poison] = [r for r in found if r["type"] == ""]
    assert poison["value"] == {"bytes": len(POISON), "hex": POISON[:16].hex()}


def test_cat_filters_by_what_records_say(planted: Planted) -> None:
    assert [r["value"]["uid"] for r in records(planted, "rollouts", "--uid", "twice-0")] == ["twice-0", "twice-0"]
    found = records(planted, "rollouts", "--example", "cancelled")
    assert [r["type"] for r in found] == ["Rollout"] * 3 + ["GroupCancelled"]
    assert records(planted, "rollouts", "--env", "other") == []
    [batch] = records(planted, "batches", "--uid", "twice-0")
    assert batch["value"]["batch_id"] == planted.batch_of("twice-0").batch_id
    assert {r["value"]["kind"] for r in records(planted, "rollouts", "--policy-version", "5")} == {"policy_version"}
    assert records(planted, "rollouts", "--until", "2020-01-01") == []
    assert len(records(planted, "rollouts", "--since", "-86400")) == len(records(planted, "rollouts"))


def test_cat_takes_the_flags_of_kcat(planted: Planted) -> None:
    whole = [r for r in records(planted, "rollouts") if r["partition"] == 1]
    assert records(planted, "rollouts", "-p", "1", "-o", "3", "-c", "2") == whole[3:5]
    assert records(planted, "rollouts", "-p", "1", "-o", "-4") == whole[-4:]
    assert records(planted, "rollouts", "-p", "1", "-o", "end") == []
    cut = whole[5]["timestamp_ms"]
    assert records(planted, "rollouts", "-p", "1", "-o", f"s@{cut}") == [r for r in whole if r["timestamp_ms"] >= cut]
    assert records(planted, "rollouts", "-p", "1", "-o", f"e@{cut}") == [r for r in whole if r["timestamp_ms"] < cut]
    found = lines(
        planted, "cat", "planted.rollouts", "-p", "1", "-c", "1", "-o", "2", "-f", "%t[%p]@%o %k %S\\t100%%\\n"
    )
    value = json.loads(lines(planted, "cat", "rollouts", "-p", "1", "-c", "1", "-o", "2", "-f", "%s")[0])
    assert found == [f"planted.rollouts[1]@2 {whole[2]['key']} {found[0].split()[-2]}\t100%"]
    assert value == whole[2]["value"]


def test_cat_summarises_arrays_unless_told_otherwise(planted: Planted) -> None:
    [short] = records(planted, "batches", "-p", "0", "-c", "1")
    [full] = records(planted, "batches", "-p", "0", "-c", "1", "--full")
    assert short["value"]["tokens"]["dtype"] == "int32"
    assert short["value"]["tokens"]["length"] == len(full["value"]["tokens"])
    assert short["value"]["tokens"]["max"] == max(full["value"]["tokens"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("cat", "rollout"), "no topic is called 'rollout'"),
        (("cat", "rollouts", "-p", "7"), "has partitions 0 to 1"),
        (("cat", "rollouts", "-o", "soon"), "is no position"),
        (("cat", "rollouts", "-f", "%q"), "%q means nothing"),
        (("cat", "rollouts", "--since", "yesterday"), "is no time"),
        (("lineage", "--rollout", "nobody"), "has uid 'nobody'"),
        (("lineage", "--offset", "0:99999"), "holds offsets 0 to"),
        (("lineage", "--batch", "9-9"), "has no batch 9-9"),
        (("lineage", "--step", "77"), "has no step 77"),
        (("lineage", "--policy", "77"), "has no policy version 77"),
    ],
)
def test_what_cannot_be_answered_is_one_line(planted: Planted, words: tuple[str, ...], said: str) -> None:
    found = rollstream(planted, *words)
    assert found.returncode == 2
    assert found.stdout == ""
    [line] = found.stderr.splitlines()
    assert said in line


# ---------------------------------------------------------------------- lineage


def walk(tree: dict[str, Any]) -> list[dict[str, Any]]:
    return [tree, *(node for child in tree.get("children", []) for node in walk(child))]


def kinds(tree: dict[str, Any]) -> list[tuple[str, str]]:
    return [(node["kind"], node["name"]) for node in walk(tree)]


def test_lineage_leads_from_a_rollout_to_the_policy_it_made(planted: Planted) -> None:
    first = planted.batches[0]
    [tree] = answer(planted, "lineage", "--rollout", first.uids[0])
    found = kinds(tree)
    assert found[0] == ("rollout", first.uids[0])
    assert ("sampled_by_policy", "0") in found
    assert ("batch", first.batch_id) in found
    assert ("step", "main/1") in found
    assert ("published_as_policy", "6") in found
    [group] = [node for node in walk(tree) if node["kind"] == "group"]
    assert group["members"] == 4
    assert set(group["with"]) == {u for u in first.uids if u.split("-")[0] == first.uids[0].split("-")[0]} - {
        first.uids[0]
    }
    [batch] = [node for node in walk(tree) if node["kind"] == "batch"]
    assert batch["advantage"] == pytest.approx(float(first.advantages[0]))


def test_lineage_of_each_planted_record_tells_its_fate(planted: Planted) -> None:
    trees = answer(planted, "lineage", "--rollout", planted.twice)
    assert len(trees) == 2
    assert ("batch", planted.batch_of(planted.twice).batch_id) in kinds(trees[0])
    assert ("fate", "dropped: duplicate_uid") in kinds(trees[1])
    for uid, reason in ((planted.slow[0], "group_too_small"), (planted.stale[0], "stale_version")):
        [tree] = answer(planted, "lineage", "--rollout", uid)
        assert ("fate", f"dropped: {reason}") in kinds(tree)
    [poison] = [r for r in records(planted, "rollouts") if r["type"] == ""]
    [tree] = answer(planted, "lineage", "--offset", f"{poison['partition']}:{poison['offset']}")
    assert ("fate", "dead lettered") in kinds(tree)
    [cancelled] = [r for r in records(planted, "rollouts") if r["type"] == "GroupCancelled"]
    [tree] = answer(planted, "lineage", "--offset", f"{cancelled['partition']}:{cancelled['offset']}")
    assert kinds(tree) == [("cancellation", "of cancelled-3"), ("fate", "control")]


def test_lineage_leads_back_from_a_policy_to_offsets(planted: Planted) -> None:
    [tree] = answer(planted, "lineage", "--policy", "6")
    found = kinds(tree)
    first, second = planted.batches[:2]
    assert ("step", "main/1") in found
    uses = [node for node in walk(tree) if node["kind"] == "batch"]
    assert [(u["name"], "trained" in u, "skipped" in u) for u in uses] == [
        (first.batch_id, True, False),
        (second.batch_id, False, True),
    ]
    spans = [node["offsets"] for node in walk(tree) if node["kind"] == "cut_from"]
    assert len(spans) == 2
    offsets = [offset for span in spans[0] for offset in range(int(span.split("-")[0]), int(span.split("-")[-1]) + 1)]
    assert offsets == sorted(first.source_offsets.tolist())


def test_lineage_of_a_step_a_batch_and_a_version_agree(planted: Planted) -> None:
    batch = planted.batches[0]
    [step] = answer(planted, "lineage", "--step", "1")
    assert ("published_as_policy", "6") in kinds(step)
    [tree] = answer(planted, "lineage", "--batch", batch.batch_id)
    assert tree["digest"] == batch.digest
    assert ("step", "main/1") in kinds(tree)
    [version] = answer(planted, "lineage", "--policy", "0")
    [sampled] = [node for node in walk(version) if node["kind"] == "batched_rollouts"]
    assert sampled["name"] == str(4 * len(GOOD) + 4 + 3)
    text = "\n".join(lines(planted, "lineage", "--batch", batch.batch_id))
    assert "└─ " in text
    assert batch.batch_id in text
