"""Every command of docs/runbook.md, on a run in the state that its section is about."""

import json
import re
import shlex
import signal
from pathlib import Path

import pytest

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core.effects import CORE_VERSION
from rollstream.consumers.grouping.process.bootstrap import initialise
from rollstream.consumers.weights.state_manager import StateManager
from rollstream.infra.broker.cluster import LocalCluster
from rollstream.pipeline.audit.verification import verify
from rollstream.topics.config import KafkaConfig, TopicsConfig
from rollstream.topics.kafka import provisioning, topic_admin
from rollstream.topics.kafka.groups import members
from rollstream.topics.records import Mark
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from tests.support import kafka_tools
from tests.support.pages import page
from tests.support.runs import RealRun, rollout
from tests.support.settled import settled
from tests.support.topic_settings import change_settings
from tests.support.waiting import eventually

PAGE = page("runbook").partition("\n## Troubleshooting\n")[0]
SECTIONS = {
    title: [
        line
        for block in re.findall(r"```sh\n(.*?)```", body, re.DOTALL)
        for line in block.replace("\\\n", "").splitlines()
    ]
    for title, body in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
}
ON_A_CLUSTER = ("A broker is lost", "Move to another cluster")


def carried_out(run: RealRun, line: str, **other: str) -> str:
    """Output of a command of the page, for this run on its brokers; `other` replaces words of the command."""
    for shown, real in {"127.0.0.1:9092": run.kafka.bootstrap_servers.split(",")[0], **other}.items():
        line = line.replace(shown, real)
    program, *words = shlex.split(re.sub(r"\bmain\b", run.name, line))
    if program != "rollstream":
        return kafka_tools.output_of(shlex.join([program, *words]), run.directory)
    done = run.said(*words)
    # Exit code 1 is an answer as well: no letter could be sent again.
    assert done.returncode in ((0, 1) if "redrive" in words else (0,)), f"{line}: {done.stdout}{done.stderr}"
    return done.stdout


def section(run: RealRun, title: str, **other: str) -> list[str]:
    return [carried_out(run, line, **other) for line in SECTIONS[title]]


def groups(run: RealRun, name: str, count: int = 8) -> None:
    run.send(rollout(f"{name}{n}", member) for n in range(count) for member in range(4))


def test_every_command_of_the_page_is_in_a_section_that_a_test_carries_out() -> None:
    of_one_broker = {
        "What to watch",
        "Lag grows",
        "A process crash-loops or is stuck",
        "Reset a group",
        "Records cannot be used",
        "The disk fills",
        "The learner stalls or learns the wrong thing",
        "Sampling falls behind",
    }
    assert {title for title, lines in SECTIONS.items() if lines} == {*of_one_broker, *ON_A_CLUSTER}


@pytest.mark.long  # It takes a run through one trouble after the other.
def test_the_commands_help_as_the_page_says(real_run: RealRun) -> None:
    run = real_run
    run.grouping = GroupingConfig(batch_rollouts=4, max_batch_age_s=2.0)
    provisioning.apply(run.kafka, run.topics, run.name)
    initialise(run.kafka, run.name, run.grouping, run.grouper)
    with StateManager(run.kafka, run=run.name) as states:
        states.update_state({"w": [0.0]})

    values = json.loads(GroupingConfig(generation=1).to_json()) | {"core_version": CORE_VERSION + 1}
    foreign = Mark(kind="configuration", generation=1, configuration=json.dumps(values))
    run.send_bytes("rollouts", encode(foreign), encode_key("mark", foreign.kind), 0)
    stopped = run.start("group")
    assert stopped.wait(300) == 2
    place = run.log_of(stopped).rpartition("group skip ")[2].split()[0]
    pause, skip, resume = SECTIONS["A process crash-loops or is stuck"]
    carried_out(run, pause)
    process = run.start("group")
    groups(run, "x")
    carried_out(run, skip, **{"0:1217": place})
    carried_out(run, resume)
    settled(run, batched=32, dead_lettered=1)

    runs, _top, book = section(run, "What to watch")
    assert run.name in runs
    assert "every record is in exactly one place" in book
    change_settings(run.kafka, run.topic("rollouts"), retention__ms="60000000")
    assert topic_admin.retention_s(run.kafka, run.topic("rollouts")) == 60_000
    _top, _mend, plan, _applied = section(run, "Lag grows")
    assert "retention.ms" in plan
    assert topic_admin.retention_s(run.kafka, run.topic("rollouts")) == float("inf")

    run.send_bytes("rollouts", b"no record", b"key", 0)
    settled(run, dead_lettered=2)
    listed, _shown, _redriven, excluded = section(run, "Records cannot be used")
    assert "unknown" in listed or "0:0" in listed
    assert "batched" in excluded
    section(run, "The learner stalls or learns the wrong thing")
    [whole] = section(run, "Sampling falls behind")
    assert "1 of 1 versions" in whole

    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == 0
    await_members_gone(run)
    reset_by_hand(run)
    await_members_gone(run)
    carried_out(run, "rollstream archive --run main")
    recovered, *_archive = section(run, "Reset a group")
    assert "committed again" in recovered
    run.start("group")
    groups(run, "y")
    settled(run, batched=64, dead_lettered=2)
    archived, checked, dry, _pruned = section(run, "The disk fills")
    assert archived
    assert checked
    assert "would be deleted" in dry
    book = settled(run, batched=64)
    assert book.problems == []
    assert verify(run.kafka, run.name).mismatches == []


def await_members_gone(run: RealRun) -> None:
    eventually(lambda: not members(run.kafka, f"{run.name}.grouper"), 60, "the group has no members", every_s=0.5)


def reset_by_hand(run: RealRun) -> None:
    """Somebody moves grouping's positions: its processes refuse to start, and nothing is batched twice."""
    line = "kafka-consumer-groups.sh --bootstrap-server 127.0.0.1:9092 --group main.grouper --reset-offsets "
    carried_out(run, line + "--to-earliest --topic main.rollouts --execute")
    refused = run.start("group")
    assert refused.wait(300) == 2
    assert "group recover" in run.log_of(refused)


@pytest.mark.long  # It starts four brokers.
def test_a_run_moves_to_other_brokers_under_load_and_outlives_the_old_one(tmp_path: Path, run_name: str) -> None:
    with LocalCluster.start(tmp_path / "brokers", 4, bound_to_parent=True) as cluster:
        kafka = KafkaConfig(bootstrap_servers=cluster.bootstrap_servers)
        topics = TopicsConfig(partitions=2, replication_factor=3, min_insync_replicas=2)
        run = RealRun(kafka, run_name, tmp_path, topics)
        run.grouping = GroupingConfig(batch_rollouts=4, max_batch_age_s=2.0)
        try:
            moved_under_load(run, cluster)
        finally:
            run.stop()


def moved_under_load(run: RealRun, cluster: LocalCluster) -> None:
    run.prepare()
    run.start("group")
    groups(run, "before")
    settled(run, batched=32)
    generate, execute, done = SECTIONS["Move to another cluster"]
    names = [name for name in topic_admin.topic_names(run.kafka) if name.startswith(f"{run.name}.")]
    topics = [{"topic": name} for name in (*names, "__consumer_offsets", "__transaction_state")]
    (run.directory / "topics.json").write_text(json.dumps({"version": 1, "topics": topics}))
    proposed = carried_out(run, generate, **{"4,5,6": "2,3,4"})
    [_before, plan] = [text for text in proposed.splitlines() if text.startswith("{")]
    (run.directory / "plan.json").write_text(plan)
    groups(run, "at the start")
    carried_out(run, execute)
    groups(run, "meanwhile")
    eventually(lambda: "still in progress" not in carried_out(run, done), 300, "all partitions moved", every_s=1)
    settled(run, batched=96)
    cluster.kill(0)
    here = ",".join(run.kafka.bootstrap_servers.split(",")[1:])
    run.kafka = KafkaConfig(bootstrap_servers=here)
    groups(run, "after")
    book = settled(run, batched=128)
    assert (book.problems, book.dropped) == ([], {})
    assert verify(run.kafka, run.name).mismatches == []
    listed, *_others = section(run, "A broker is lost")
    assert run.name not in listed, "no partition of the run lacks a replica"
