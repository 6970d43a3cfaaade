"""Tools on a run with planted facts: each finds what was planted, names it, and finds nothing else."""

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollstream.pipeline.audit.ledger import ledger
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.index.indexed_run import indexed_run
from rollstream.pipeline.index.lineage import policy_lineage
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka import clients, provisioning
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.records import Rollout
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import decode_as, kind_of
from tests.support.batches import indexed_batches
from tests.support.command_line import answer_of
from tests.support.paths import ROOT
from tests.support.planted import GOOD, POISON, Planted, check, plant
from tests.support.runs import RealRun
from tests.support.waiting import eventually


@pytest.fixture(scope="module")
def planted(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planted]:
    run = RealRun(KafkaConfig(bootstrap_servers=broker), "planted", tmp_path_factory.mktemp("run"))
    try:
        yield plant(run)
    finally:
        run.stop()


def rollstream(planted: Planted, *words: str) -> subprocess.CompletedProcess[str]:
    run = planted.run
    where = () if "--run" in words else ("--run", run.name)
    return answer_of(run.directory, *words, *where, "-b", run.kafka.bootstrap_servers)


def lines(planted: Planted, *words: str) -> list[str]:
    done = rollstream(planted, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def answer(planted: Planted, *words: str) -> Any:
    return json.loads("\n".join(lines(planted, *words, "--json")))


def test_a_report_has_the_figures_of_the_commands(planted: Planted, tmp_path: Path) -> None:
    book = answer(planted, "ledger")
    assert lines(planted, "report", "-o", str(tmp_path / "report.html")) == [str(tmp_path / "report.html")]
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert f"The ledger balances: {book['produced']:,} records, each in exactly one place" in page
    for name in ("batched", "dead_lettered", "control"):
        assert f'<td data-name="{name}">{book[name]:,}</td>' in page
    for reason, count in book["dropped"].items():
        assert f'<td data-name="{reason}">{count:,}</td>' in page
    [place] = set(re.findall(r"rollstream show --run planted ([0-9:]+)<", page))
    [shown] = answer(planted, "show", place)
    assert f"Rollout {place} <small>{shown['rollout']['uid']}</small>" in page
    assert shown["rollout"]["reward"] == 1.0, "the best comes first"


def records(planted: Planted, *words: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines(planted, "cat", *words, "--json")]


def test_the_ledger_names_what_was_planted(planted: Planted) -> None:
    check(ledger(planted.run.kafka, planted.run.name))


def test_the_ledger_tells_tokens_and_each_environment_apart(planted: Planted) -> None:
    book = answer(planted, "ledger", "--by", "env")
    good = 4 * len(GOOD) + 4 + 3
    dropped = {"dropped:duplicate_uid": 1, "dropped:group_too_small": 2, "dropped:stale_version": 4}
    # Each rollout of this run has six tokens; the poison record names no environment.
    figures = book["environments"]
    assert figures["env"]["records"] == {"produced": good + 7, "batched": good, **dropped, "in_flight": 0}
    assert figures["env"]["tokens"] == {name: 6 * count for name, count in figures["env"]["records"].items()}
    assert figures[""]["records"] == {"produced": 1, "dead_lettered": 1, "in_flight": 0}
    assert book["tokens"]["batched"] == 6 * good
    assert book["produced"] == good + 7 + 1 + book["control"]
    assert (book["evals"], book["pruned"]) == (0, 0)
    # Lost are two rollouts of too small groups, four stale ones, and the batch that the learner skipped.
    assert book["skipped_as"] == {"stale_version": book["skipped"]}
    assert book["selection"]["env"]["lost"]["rollouts"] == 6 + book["skipped"]
    assert book["selection"]["env"]["batched"]["rollouts"] == good - book["skipped"]
    text = lines(planted, "ledger", "--by", "env")
    assert "  dropped: stale version          4" in text
    assert "evals, not included above: 0 rollouts" in text
    assert max(len(line) for line in text if not line.startswith("the lost rollouts")) <= 80


@pytest.mark.kafka
def test_the_ledger_follows_until_interrupted(planted: Planted) -> None:
    command = planted.run.command("ledger", "--json", "--watch", "0.1")
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        books = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 130
    assert [book["balanced"] for book in books] == [True, True]


def test_a_ledger_that_does_not_close_names_the_first_offending_offsets(planted: Planted) -> None:
    """A copy of the run lacks a record of each partition, and its dead letters."""
    kafka, copy = planted.run.kafka, "planted-lacking"
    provisioning.apply(kafka, planted.run.topics, copy)
    producer = clients.producer(kafka)
    for name in ("rollouts", "journal", "batches"):
        for message in read_to_end(kafka, planted.run.topic(name)):
            if name == "rollouts" and message.offset == 1:
                continue
            producer.produce(topic_name(copy, name), message.value, message.key, message.partition)
    assert producer.flush(120) == 0
    done = rollstream(planted, "ledger", "--run", copy)
    assert done.returncode == 1
    assert "THE LEDGER DOES NOT BALANCE" in done.stdout
    assert "rollouts[0] offset" in done.stdout
    assert "dead-lettered in the journal alone" in done.stdout


# ---------------------------------------------------------------------- cat


def test_cat_prints_every_record_decoded_in_the_order_of_its_partition(planted: Planted) -> None:
    listed = records(planted, "rollouts")
    assert len(listed) == ledger(planted.run.kafka, planted.run.name).produced
    for partition in range(2):
        offsets = [r["offset"] for r in listed if r["partition"] == partition]
        assert offsets == sorted(offsets)
    kinds = {r["type"] for r in listed}
    assert kinds == {"Rollout", "GroupCancelled", "Mark", ""}
    [poison] = [r for r in listed if r["type"] == ""]
    assert poison["value"] == {"bytes": len(POISON), "hex": POISON[:16].hex()}


def test_cat_filters_by_what_records_say(planted: Planted) -> None:
    assert [r["value"]["uid"] for r in records(planted, "rollouts", "--uid", "twice-0")] == ["twice-0", "twice-0"]
    listed = records(planted, "rollouts", "--example", "cancelled")
    assert [r["type"] for r in listed] == ["Rollout"] * 3 + ["GroupCancelled"]
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
    assert records(planted, "rollouts", "-p", "1", "-o", "-4", "-c", "4", "--follow") == whole[-4:]
    assert records(planted, "rollouts", "-p", "1", "-o", "end") == []
    cut = whole[5]["timestamp_ms"]
    assert records(planted, "rollouts", "-p", "1", "-o", f"s@{cut}") == [r for r in whole if r["timestamp_ms"] >= cut]
    assert records(planted, "rollouts", "-p", "1", "-o", f"e@{cut}") == [r for r in whole if r["timestamp_ms"] < cut]
    printed = lines(
        planted, "cat", "planted.rollouts", "-p", "1", "-c", "1", "-o", "2", "-f", "%t[%p]@%o %k %S\\t100%%\\n"
    )
    value = json.loads(lines(planted, "cat", "rollouts", "-p", "1", "-c", "1", "-o", "2", "-f", "%s")[0])
    assert printed == [f"planted.rollouts[1]@2 {whole[2]['key']} {printed[0].split()[-2]}\t100%"]
    assert value == whole[2]["value"]


def test_cat_summarises_arrays_unless_told_otherwise(planted: Planted) -> None:
    [short] = records(planted, "batches", "-p", "0", "-c", "1")
    [full] = records(planted, "batches", "-p", "0", "-c", "1", "--full")
    assert short["value"]["tokens"]["dtype"] == "int32"
    assert short["value"]["tokens"]["length"] == len(full["value"]["tokens"])
    assert short["value"]["tokens"]["max"] == max(full["value"]["tokens"])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("cat", "rollout"), "there is no topic 'rollout'"),
        (("cat", "rollouts", "-p", "7"), "has partitions 0 to 1"),
        (("cat", "rollouts", "-o", "soon"), "is not a position"),
        (("cat", "rollouts", "-f", "%q"), "%q is not a format"),
        (("cat", "rollouts", "--since", "yesterday"), "is not a time"),
        (("lineage", "--rollout", "nobody"), "has uid 'nobody'"),
        (("lineage", "--offset", "0:99999"), "holds offsets 0 to"),
        (("lineage", "--batch", "9-9"), "has no batch 9-9"),
        (("lineage", "--step", "77"), "has no step 77"),
        (("lineage", "--policy", "77"), "has no policy version 77"),
    ],
)
def test_what_cannot_be_answered_is_one_line(planted: Planted, words: tuple[str, ...], text: str) -> None:
    done = rollstream(planted, *words)
    assert done.returncode == 2
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert text in line


# ---------------------------------------------------------------------- lineage


def walk(tree: dict[str, Any]) -> list[dict[str, Any]]:
    return [tree, *(node for child in tree.get("children", []) for node in walk(child))]


def kinds(tree: dict[str, Any]) -> list[tuple[str, str]]:
    return [(node["kind"], node["name"]) for node in walk(tree)]


def test_lineage_leads_from_a_rollout_to_the_policy_it_made(planted: Planted) -> None:
    first = planted.batches[0]
    [tree] = answer(planted, "lineage", "--rollout", first.uids[0])
    kinds_seen = kinds(tree)
    assert kinds_seen[0] == ("rollout", first.uids[0])
    assert ("sampled_by_policy", "0") in kinds_seen
    assert ("batch", first.batch_id) in kinds_seen
    assert ("step", "main/1") in kinds_seen
    assert ("published_as_policy", "6") in kinds_seen
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
    kinds_seen = kinds(tree)
    first, second = planted.batches[:2]
    assert ("step", "main/1") in kinds_seen
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


def test_lineage_of_a_policy_reads_all_batches_by_one_client(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    build = clients.reader

    def counted(*args: Any, **settings: Any) -> Any:
        made.append("reader")
        return build(*args, **settings)

    monkeypatch.setattr(clients, "reader", counted)
    with indexed_run(RunConfig(run=planted.run.name, kafka=planted.run.kafka, data_dir=planted.run.directory)) as view:
        made.clear()
        [manifest] = [manifest for manifest in [view.policy(0)] if manifest]
        assert policy_lineage(view, manifest).children
        assert len(planted.batches) > 2
        assert len(made) == 1


# ---------------------------------------------------------------------- verify


def test_verify_computes_all_some_the_last_or_a_sample_again(planted: Planted) -> None:
    count = len(planted.batches)
    assert answer(planted, "verify")["batches"] == count
    assert answer(planted, "verify")["drops"] == 7
    for words, expected in (
        ((planted.batches[2].batch_id, planted.batches[0].batch_id), 2),
        (("--last", "3"), 3),
        (("--sample", "2", "--seed", "5"), 2),
    ):
        reply = answer(planted, "verify", *words)
        assert (reply["batches"], reply["mismatches"]) == (expected, 0), reply


def test_verify_names_a_batch_that_is_not_there(planted: Planted) -> None:
    done = rollstream(planted, "verify", "7-7")
    assert done.returncode == 2
    assert "has no batch 7-7" in done.stderr


# ---------------------------------------------------------------------- replay


def test_a_replay_of_the_same_configuration_gives_the_same_batches(planted: Planted) -> None:
    reply = answer(planted, "replay")
    assert (reply["differing"], reply["changed"]) == (0, {})
    assert reply["recorded"] == reply["replayed"]
    assert reply["replayed"]["dropped"] == {"duplicate_uid": 1, "group_too_small": 2, "stale_version": 4}
    assert "batches are the same" in "\n".join(lines(planted, "replay"))


def test_a_replay_under_another_estimator_changes_advantages_alone(planted: Planted) -> None:
    reply = answer(planted, "replay", "--set", "grouping.estimator=grpo")
    assert reply["changed"] == {"estimator": [["rloo"], "grpo"]}
    recorded, replayed = reply["recorded"], reply["replayed"]
    assert recorded.pop("advantages")["env"]["max"] == pytest.approx(2 / 3)
    assert replayed.pop("advantages")["env"]["max"] > 0.99
    assert recorded == replayed
    assert reply["differing"] == len(planted.batches)


def test_a_replay_that_forgives_age_keeps_the_stale_group(planted: Planted) -> None:
    reply = answer(planted, "replay", "--set", "grouping.max_policy_lag=9", "--set", "grouping.min_group_size=2")
    assert "stale_version" not in reply["replayed"]["dropped"]
    assert "group_too_small" not in reply["replayed"]["dropped"]
    # The slow group is batched; the stale one is complete and still waits where the log ends.
    assert reply["replayed"]["rollouts"] == reply["recorded"]["rollouts"] + 2
    assert (reply["recorded"]["in_flight"], reply["replayed"]["in_flight"]) == (0, 4)
    text = "\n".join(lines(planted, "replay", "--set", "grouping.max_policy_lag=9"))
    assert "max_policy_lag: 1 -> 9" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_replay_from_a_time_on_begins_at_a_snapshot(planted: Planted) -> None:
    whole = records(planted, "rollouts")
    late = max(r["timestamp_ms"] for r in whole if r["type"] == "GroupCancelled")
    reply = answer(planted, "replay", "--from", str(late / 1000 + 0.001))
    assert reply["differing"] == 0
    assert reply["replayed"]["dropped"]["stale_version"] == 4


def test_a_replay_into_another_run_is_one_a_learner_can_follow(planted: Planted) -> None:
    into = "planted-leave-nobody"
    reply = answer(planted, "replay", "--set", "grouping.min_group_size=2", "--into", into)
    batches = [read.batch for read in indexed_batches(planted.run.kafka, into)]
    assert sum(map(len, batches)) == reply["replayed"]["rollouts"] == reply["recorded"]["rollouts"] + 2
    assert [b.cut_ms for b in batches] == sorted(b.cut_ms for b in batches)
    assert {r["key"] for r in records(planted, "policies", "--run", into)} == {"[0]", "[5]", "[6]"}
    again = rollstream(planted, "replay", "--into", into)
    assert again.returncode == 2
    assert "has batches already" in again.stderr


def test_a_replay_makes_batches_for_supervised_training_of_the_best_of_each_group(planted: Planted) -> None:
    into = "planted-sft"
    answer(planted, "replay", "--set", "grouping.estimator=best", "--set", "grouping.maker=sft", "--into", into)
    batches = [read.batch for read in indexed_batches(planted.run.kafka, into)]
    messages = read_to_end(planted.run.kafka, planted.run.topic("rollouts"))
    readable = [decode_as(Rollout, message.value) for message in messages if kind_of(message.value) == "Rollout"]
    rewards = {r.uid: (r.reward, (r.environment, r.example_id, r.policy_version, r.group_id)) for r in readable}
    chosen = [rewards[uid] for batch in batches for uid in batch.uids]
    assert chosen
    assert len({group for _reward, group in chosen}) == len(chosen), "one of each group"
    assert all(reward == max(r for r, g in rewards.values() if g == group) > 0 for reward, group in chosen)
    assert {value for batch in batches for value in batch.advantages.tolist()} == {1.0}


def test_a_replay_makes_pairs_of_the_best_and_the_worst_of_each_group(planted: Planted) -> None:
    into = "planted-pairs"
    answer(planted, "replay", "--set", "grouping.estimator=best_worst", "--set", "grouping.maker=pairs", "--into", into)
    batches = [read.batch for read in indexed_batches(planted.run.kafka, into)]
    assert batches
    for batch in batches:
        assert batch.group_index.tolist() == [row // 2 for row in range(len(batch))], "two of each group, side by side"
        signs = [float(batch.advantages[int(begin)]) for begin in batch.splits[:-1]]
        for first in range(0, len(batch), 2):
            rewards = dict(zip(signs[first : first + 2], batch.rewards[first : first + 2].tolist(), strict=True))
            assert rewards[1.0] > rewards[-1.0]


def test_a_replay_leaves_the_policy_versions_of_a_run_that_has_some(planted: Planted) -> None:
    """A fork that trains has steps and versions, but no batches of its own."""
    fork = planted.run.beside("fork").prepare()
    before = list(read_to_end(fork.kafka, fork.topic("policies")))
    refused = rollstream(planted, "replay", "--into", fork.name)
    assert refused.returncode == 2
    assert f"run {fork.name} has policies already" in refused.stderr
    assert list(read_to_end(fork.kafka, fork.topic("policies"))) == before


# ---------------------------------------------------------------------- show


def test_show_tells_of_a_rollout_its_group_and_its_fate(planted: Planted) -> None:
    first = planted.batches[0]
    [shown] = answer(planted, "show", first.uids[0])
    assert shown["advantage"] == pytest.approx(float(first.advantages[0]))
    assert [m["uid"] for m in shown["group"]] == list(first.uids[:4])
    assert shown["fate"]["name"] == first.batch_id
    assert shown["rollout"]["tokens"] == first.tokens[:6].tolist()
    text = "\n".join(lines(planted, "show", shown["offset"]))
    assert f"rollout {first.uids[0]}" in text
    assert f"> {first.uids[0]}" in text
    assert f"batch {first.batch_id}" in text
    assert "\x1b[" not in text
    [dropped] = answer(planted, "show", planted.slow[0])
    assert (dropped["advantage"], dropped["group"]) == (None, [])
    assert dropped["fate"]["name"] == "dropped: group_too_small"


def test_show_names_what_a_learner_replays_and_batches_carry_it(planted: Planted) -> None:
    text = "\n".join(lines(planted, "show", "good0-1"))
    assert "\nrouted_experts: 2 x 2 of 5 tokens, uint8, 24 bytes\n" in text
    assert "\nsampling_mask: 2.0 tokens kept for each sampled token, 24 bytes\n" in text
    assert "sampling_mask" not in "\n".join(lines(planted, "show", "good0-2"))
    batch = planted.batch_of("good0-1")
    carriers = [batch.uids[row] for entry in batch.token_arrays for row in entry.rows.tolist()]
    assert sorted(carriers) == sorted(3 * ["good0-1", "good0-3"])


def test_show_has_the_advantage_as_colour(planted: Planted) -> None:
    first = planted.batches[0]
    good, bad = (next(u for u, a in zip(first.uids, first.rewards, strict=True) if a == reward) for reward in (1, 0))
    assert "\x1b[48;2;0;" in "\n".join(lines(planted, "show", good, "--color", "always"))
    assert ";0;0m" in "\n".join(lines(planted, "show", bad, "--color", "always"))
    assert "\x1b[48;2;0;" not in "\n".join(lines(planted, "show", bad, "--color", "always"))


# ---------------------------------------------------------------------- dead letters

FIX = """
from tests.support.runs import rollout

def fix(value, key, headers):
    assert headers["__streams.errors.message"]
    return rollout("mended", 0) if value == b"\\xc3\\x01 not a record" else None
"""


def test_dead_letters_are_listed_and_shown(planted: Planted) -> None:
    [letter] = answer(planted, "dlq", "ls")
    [poison] = [r for r in records(planted, "rollouts") if r["type"] == ""]
    assert (letter["partition"], letter["offset"]) == (poison["partition"], poison["offset"])
    assert "unknown schema fingerprint" in letter["reason"]
    assert letter["redriven"] is None
    text = "\n".join(lines(planted, "dlq", "show", letter["letter"]))
    assert POISON.hex(" ") in text
    assert "__streams.errors.offset" in text
    assert letter["reason"] in lines(planted, "dlq", "ls")[1], "whole, where no terminal is"
    assert "has no dead letter 0:999" in rollstream(planted, "dlq", "show", "0:999").stderr
    assert "by PARTITION:OFFSET" in rollstream(planted, "dlq", "show", "0").stderr


def test_groups_of_a_run_are_files_each_once(planted: Planted, tmp_path: Path) -> None:
    reply = answer(planted, "groups", str(tmp_path / "store"), "--batches")
    # Half of the slow group never came; the store waits for as many members as the producer stated.
    stats = reply["environments"]["env"]
    assert (stats["groups"], stats["open_groups"], stats["open_rollouts"]) == (len(GOOD) + 3, 1, 2)
    assert reply["left_out"] == 1
    assert len(list(tmp_path.glob("store/*/part-*.parquet"))) == len(GOOD) + 3
    assert len(list(tmp_path.glob("store/batches/*.parquet"))) == len(planted.batches)
    again = answer(planted, "groups", str(tmp_path / "store"), "--batches")
    assert (again["records"], again["batch_records"], again["environments"]["env"]["groups"]) == (0, 0, len(GOOD) + 3)
    assert "0 records are new" in "\n".join(lines(planted, "groups", str(tmp_path / "store")))


def test_a_dead_letter_is_redriven_once_mended_and_on_record(planted: Planted, tmp_path: Path) -> None:
    [letter] = answer(planted, "dlq", "ls")
    as_it_is = rollstream(planted, "dlq", "redrive", "--json")
    assert as_it_is.returncode == 1
    assert "unknown schema fingerprint" in json.loads(as_it_is.stdout)["left"][letter["letter"]]
    script = tmp_path / "mend.py"
    script.write_text(FIX)
    before = ledger(planted.run.kafka, planted.run.name)
    tried = answer(planted, "dlq", "redrive", "--fix", str(script), "--dry-run")
    assert tried == {"redriven": [letter["letter"]], "left": {}}
    assert ledger(planted.run.kafka, planted.run.name).produced == before.produced
    assert answer(planted, "dlq", "redrive", "--fix", str(script)) == tried
    again = rollstream(planted, "dlq", "redrive", letter["letter"], "--fix", str(script), "--json")
    assert again.returncode == 1
    assert "was redriven at" in json.loads(again.stdout)["left"][letter["letter"]]
    assert answer(planted, "dlq", "redrive", "--fix", str(script)) == {"redriven": [], "left": {}}
    [listed] = answer(planted, "dlq", "ls")
    assert listed["redriven"]
    # The end of its transaction may be visible later.
    [sent] = eventually(lambda: records(planted, "rollouts", "--uid", "mended-0"), 60, "the letter, sent again")
    assert sent["headers"] == {"rollstream.redriven.from": letter["letter"]}
    book = ledger(planted.run.kafka, planted.run.name)
    assert book.balanced, book.problems
    assert (book.produced, book.unread) == (before.produced + 1, before.unread + 1)


# ---------------------------------------------------------------------- the last one: it stops the broker


# ---------------------------------------------------------------------- top


def test_top_counts_what_the_ledger_proves(planted: Planted) -> None:
    reply, book = answer(planted, "top"), ledger(planted.run.kafka, planted.run.name)
    names = (
        "produced", "rollouts", "batched", "batches", "trained", "skipped", "dropped", "dead_lettered", "control",
        "in_flight", "unread",
    )  # fmt: skip
    assert {name: reply[name] for name in names} == {name: book.as_dict()[name] for name in names}
    first = planted.batches[0]
    # The version before the step's was 5, and every rollout of its batch was sampled with 0.
    assert reply["staleness"] == {"5": len(first)}
    assert (reply["step"], reply["policy_version"], reply["waiting"]) == (1, 6, len(planted.batches) - 2)
    assert 0 < reply["reward"] < 1
    assert len(reply["rewards"]) > 0


def test_top_shows_a_run_that_is_over_on_one_screen(planted: Planted) -> None:
    shown = lines(planted, "top", "--once")
    assert len(shown) == 22
    assert shown[21].split()[0] == "group-0"
    assert max(map(len, shown)) == 80
    assert any("group too small" in line for line in shown)
    assert any("version 6" in line and "step 1" in line for line in shown)
