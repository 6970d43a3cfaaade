"""Changes around a grouping process: clocks that are set, partitions that are added, settings that differ."""

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest
from confluent_kafka.admin import NewPartitions

from rollstream.consumers.ordinal_claim import OrdinalClaim
from rollstream.infra.broker.ports import free_port
from rollstream.pipeline.audit.ledger import ledger
from rollstream.pipeline.audit.topic_reading import committed_positions
from rollstream.pipeline.config import load
from rollstream.pipeline.doctor.cluster import check_topics
from rollstream.producers.config import CapacityConfig
from rollstream.producers.flow.flow_control import FlowControl
from rollstream.producers.flow.tailers import JournalTailer
from rollstream.topics.control.named_records import pause
from rollstream.topics.errors import StateRefused
from rollstream.topics.kafka import clients, provisioning
from rollstream.topics.kafka.transactions import fence, transactional_id
from rollstream.topics.records import Metrics
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from tests.support.probes import scrape
from tests.support.runs import RealRun, rollout
from tests.support.settled import settled
from tests.support.topic_settings import change_settings
from tests.support.untold_offsets import without_first_offsets
from tests.support.waiting import eventually

CLOCK = """
import os, sys, time
now = time.time
time.time = lambda: now() - (86_400 if os.path.exists("set-back") else 0)
from rollstream.pipeline.command_line.cli import main
sys.exit(main(sys.argv[1:]))
"""

ASTRAY = """
import sys
from confluent_kafka import OFFSET_END, TopicPartition
from rollstream.topics.kafka import clients, provisioning

class Astray:
    "A consumer that its first seek of a partition leads to the partition's end, and not where it was sent."
    def __init__(self, consumer):
        self._consumer, self._sent = consumer, set()
    def __getattr__(self, name):
        return getattr(self._consumer, name)
    def seek(self, place):
        if place.partition not in self._sent:
            self._consumer.seek(TopicPartition(place.topic, place.partition, OFFSET_END))
            self._sent.add(place.partition)
        else:
            self._consumer.seek(place)

build = clients.group_member
clients.group_member = lambda *arguments, **settings: Astray(build(*arguments, **settings))
from rollstream.pipeline.command_line.cli import main
sys.exit(main(sys.argv[1:]))
"""

OFTEN = """
import sys
from rollstream.topics.kafka import topic_watch
from rollstream.pipeline.command_line.cli import main
topic_watch.EVERY_S = 0.2
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.kafka
def test_a_transaction_whose_offsets_the_broker_does_not_tell_is_made_again(real_run: RealRun) -> None:
    run = real_run.prepare()
    run.send([rollout(f"x{example}", member) for example in range(16) for member in range(4)])
    process = run.start("group", script=without_first_offsets("batches", "journal", "batch-index"))
    settled(run, batched=64)
    assert ledger(run.kafka, run.name).problems == []
    log = run.log_of(process)
    # Once for a batch and a record of the journal; nothing needs the offset of an index entry.
    assert log.count('"transaction_retried"') == log.count("without its offset") == 1, log[-3000:]
    process.terminate()
    assert process.wait(300) == 0


@pytest.mark.kafka
def test_records_that_a_seek_left_behind_are_read(real_run: RealRun) -> None:
    run = real_run.prepare()
    run.send([rollout(f"x{example}", member) for example in range(16) for member in range(4)])
    process = run.start("group", script=ASTRAY)
    settled(run, batched=64)
    assert ledger(run.kafka, run.name).problems == []
    assert run.log_of(process).count('"seek_repeated"') == 2


@pytest.mark.kafka
def test_a_host_clock_that_is_set_back_silences_no_deadline(real_run: RealRun) -> None:
    run = real_run
    run.grouping = type(run.grouping)(batch_rollouts=16, max_batch_age_s=1.0, group_deadline_s=1.0)
    run.prepare()
    process = run.start("group", script=CLOCK)
    eventually(lambda: '"task_restored"' in run.log_of(process), 60, "the process groups")
    (run.directory / "set-back").touch()
    run.send([rollout("half", member) for member in range(2)])
    eventually(
        lambda: ledger(run.kafka, run.name).dropped.get("group_too_small") == 2, 60, "the deadline of half a group"
    )


def test_a_process_that_was_fenced_without_a_rival_stops_well_and_with_one_says_so(real_run: RealRun) -> None:
    """This happens if the broker ends a transaction that outlived its timeout just before the process must end."""
    run = real_run.prepare()
    group = run.grouper.group_id(run.name)
    for example, (rival, code) in enumerate([(False, 0), (True, 3)], start=1):
        process = run.start("group")
        run.send([rollout(f"x{example}", member) for member in range(4)])
        eventually(
            lambda n=4 * example: ledger(run.kafka, run.name).batched == n, 60, "the rollouts in a batch, and committed"
        )
        if rival:
            OrdinalClaim(run.kafka, run.name, group, 0).take()
        fence(run.kafka, transactional_id(run.name, "grouper", 0))
        process.terminate()
        assert process.wait(60) == code, run.log_of(process)
        assert ('"closed_without_commit"' in run.log_of(process)) is not rival
    run.start("group")
    run.send([rollout(f"x{example}", member) for example in range(3, 9) for member in range(4)])
    settled(run, batched=32)
    assert ledger(run.kafka, run.name).problems == []


def test_partitions_that_were_added_are_refused_by_grouping_and_named_by_ledger_and_doctor(real_run: RealRun) -> None:
    run = real_run.prepare()
    process = run.start("group")
    eventually(lambda: run.log_of(process).count('"task_restored"') == 2, 60, "the process groups")
    topic = run.topic("rollouts")
    assert ledger(run.kafka, run.name).balanced
    admin = clients.admin(run.kafka)
    admin.create_partitions([NewPartitions(topic, 3)])[topic].result(300)
    assert process.wait(300) == 2
    last = run.log_of(process).strip().splitlines()[-1]
    assert last.startswith(
        f"rollstream: {topic} has 3 partitions, but had 2 when this process started; keys have moved"
    )
    assert last.endswith("start a run of another name")
    again = run.start("group")
    assert again.wait(300) == 2
    assert "start a run of another name" in run.log_of(again)
    run.send_bytes("rollouts", b"nobody reads this", b"key", 2)
    book = ledger(run.kafka, run.name)
    assert not book.balanced
    [problem] = book.problems
    assert problem.startswith("rollouts[2] was added after the run began, so no process ever reads its offsets 0 to 1;")
    config = load(
        flags=(f"run={run.name}", f"kafka.bootstrap_servers={run.kafka.bootstrap_servers}", "topics.partitions=2")
    )
    [fault] = check_topics(config, " --run main")
    assert (fault.level, fault.remedy.partition(", so ")[2]) == (
        "fault",
        "rollstream fork --run main --into NAME --partitions 3",
    )
    assert fault.text.startswith(f"topic {topic} has 3 partitions, and the journal 2: keys have moved")
    with pytest.raises(StateRefused, match=r"rollouts\[2\] has no grouping state; if the partition was added"):
        list(committed_positions(run.kafka, run.name, run.grouper))
    [other] = check_topics(replace(config, topics=replace(config.topics, weights_partitions=7)))
    assert (other.level, "the configuration says 7" in other.text) == ("fault", False)


def test_settings_that_differ_from_those_in_the_log_are_named_and_those_in_the_log_are_in_force(
    real_run: RealRun,
) -> None:
    run = real_run.prepare()
    run.grouping = replace(run.grouping, batch_rollouts=64)
    process = run.start("group", grouper__metrics_interval_s=0.2)
    run.send(rollout(f"x{example}", member) for example in range(8) for member in range(4))

    def figures() -> list[float]:
        metrics = [r.values for r in run.read("metrics") if isinstance(r, Metrics)]
        return [values["settings_ignored"] for values in metrics if "settings_ignored" in values]

    eventually(lambda: figures()[-1] == 1, 60, "the figure")
    eventually(lambda: sum(len(b.uids) for b in run.read("batches")) == 32, 60, "all rollouts batched")  # type: ignore[attr-defined]
    assert max(len(b.uids) for b in run.read("batches")) == 16  # type: ignore[attr-defined]
    [event] = [json.loads(line) for line in run.log_of(process).splitlines() if '"settings_ignored"' in line]
    assert event["settings"] == {"batch_rollouts": "64 here, 16 in the log"}
    assert "raise grouping.generation" in event["remedy"]


def test_the_marker_of_a_transaction_is_nothing_that_grouping_has_yet_to_read(real_run: RealRun) -> None:
    run = real_run.prepare()
    process = run.start("group", grouper__metrics_interval_s=0.5)
    producer = clients.transactional_producer(run.kafka, f"{run.name}-sender")
    producer.init_transactions(120)
    producer.begin_transaction()
    producer.produce(run.topic("rollouts"), encode(rollout("open")), encode_key("env", "open"))
    producer.flush(120)
    producer.commit_transaction(120)

    def newest() -> Mapping[str, float]:
        reports = [record for record in run.read("metrics") if isinstance(record, Metrics)]
        whole = [r.values for r in reports if not r.labels.keys() & {"partition", "environment"}]
        return whole[-1] if whole else {}

    eventually(lambda: (newest().get("in_flight"), newest().get("lag")) == (1, 0), 120, "a lag of 0")
    process.terminate()
    assert process.wait(120) == 0
    with JournalTailer(run.kafka, run.name) as tailer:
        flow = FlowControl(CapacityConfig(), tailer.rollout_ends)
        flow.observe(tailer.progress)
        assert (flow.outstanding, flow.mine_unseen) == (1, 0)


@pytest.mark.kafka
def test_a_process_hears_of_a_retention_that_is_set_and_restored_while_it_runs(real_run: RealRun) -> None:
    run, port = real_run.prepare(), free_port("127.0.0.1")
    run.start("group", script=OFTEN, service__port=port, grouper__metrics_interval_s=0.1)

    def served(name: str) -> dict[tuple[tuple[str, str], ...], float]:
        return scrape(f"http://127.0.0.1:{port}")[0].get(f"rollstream_grouping_{name}", {})

    eventually(lambda: '"task_restored"' in run.log_of(run.processes[0]), 60, "the process groups")
    run.send([rollout(f"x{example}", 0) for example in range(16)])
    eventually(lambda: min(served("stream_time_seconds").values(), default=0) > 0, 60, "records of both partitions")
    for partition in range(2):
        pause(run.kafka, run.name, partition, "so that rollouts stay unread")
    eventually(lambda: set(served("paused").values()) == {1.0}, 60, "both partitions to be paused")
    run.send([rollout(f"y{example}", 0) for example in range(16)])
    eventually(lambda: all(served("lag").values()), 60, "unread rollouts")
    assert served("seconds_to_retention") == {}

    change_settings(run.kafka, run.topic("rollouts"), retention__ms="1800000")
    left = eventually(lambda: served("seconds_to_retention"), 60, "the time until the deletion")
    assert all(1000 < left_s < 1800 for left_s in left.values())
    provisioning.apply(run.kafka, run.topics, run.name)
    eventually(lambda: served("seconds_to_retention") == {}, 60, "no deletion any more")
    assert all(served("lag").values())
