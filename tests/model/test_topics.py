"""Topics on a real broker: provisioning any number of times, and refusing what cannot be mended."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka.cimpl import NewTopic

from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.deployment.access_rules import TOPICS, access_rules
from rollstream.pipeline.tools.topics import provision
from rollstream.topics.errors import TopicError
from rollstream.topics.kafka import clients, provisioning, topic_admin
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.wire.catalogue import CATALOGUE, spec_of, topic_name
from tests.support.command_line import answer_of
from tests.support.runs import RealRun
from tests.support.waiting import eventually


def test_provisioning_twice_changes_nothing_the_second_time(real_run: RealRun) -> None:
    kafka, topics, run = real_run.kafka, real_run.topics, real_run.name
    first = provisioning.apply(kafka, topics, run)
    assert all(plan.create for plan in first)
    assert len(first) == len(CATALOGUE)
    assert not any(plan.needed for plan in provisioning.plan(kafka, topics, run))
    assert not any(plan.needed for plan in provisioning.apply(kafka, topics, run))
    described = {d.topic: d for d in provisioning.describe(kafka, run)}
    rollouts = described[topic_name(run, "rollouts")]
    assert rollouts.partitions == 2
    assert rollouts.settings["message.timestamp.type"] == "LogAppendTime"
    for spec in CATALOGUE:
        settings = described[topic_name(run, spec.name)].settings
        # Cleanup "none" is `delete` with endless retention, because other policies refuse DeleteRecords.
        assert settings["cleanup.policy"] == ("compact" if spec.cleanup == "compact" else "delete")
        if spec.cleanup == "none":
            assert (settings["retention.ms"], settings["retention.bytes"]) == ("-1", "-1")
        else:
            assert settings["segment.bytes"] == str(spec.segment_bytes)
    # Records of weights have a MiB each; those of other compacted topics are small.
    assert spec_of("weights").segment_bytes > spec_of("steps").segment_bytes


def test_the_user_that_applies_topics_may_write_and_read_what_that_writes(real_run: RealRun) -> None:
    config = RunConfig(run=real_run.name, kafka=real_run.kafka, topics=real_run.topics)
    provision(config)
    ends = {name: topic_admin.bounds(config.kafka, real_run.topic(name)) for name in (spec.name for spec in CATALOGUE)}
    written = {name for name, partitions in ends.items() if any(end > 0 for _begin, end in partitions.values())}
    assert written >= {"journal", "tokenizers"}
    for operation in ("Write", "Read"):
        rules = [rule.name for rule in access_rules(config, TOPICS) if operation in rule.operations]
        assert {real_run.topic(name) for name in written} <= set(rules), operation


def test_a_changed_setting_is_shown_and_mended(real_run: RealRun) -> None:
    kafka, topics, run = real_run.kafka, real_run.topics, real_run.name
    provisioning.apply(kafka, topics, run)
    larger = replace(kafka, max_record_bytes=2 * kafka.max_record_bytes)
    name = topic_name(run, "batches")
    plans = {plan.topic: plan for plan in provisioning.plan(larger, topics, run)}
    assert plans[name].changes == {"max.message.bytes": (str(kafka.max_record_bytes), str(larger.max_record_bytes))}
    provisioning.apply(larger, topics, run)
    assert not any(plan.needed for plan in provisioning.plan(larger, topics, run))


def test_the_retention_of_a_topic_is_that_of_its_settings_and_else_infinite(real_run: RealRun) -> None:
    provisioning.apply(real_run.kafka, real_run.topics, real_run.name)
    assert topic_admin.retention_s(real_run.kafka, real_run.topic("rollouts")) == math.inf
    short = NewTopic(f"{real_run.name}-short", 1, config={"retention.ms": "7200000"})
    client = clients.admin(real_run.kafka)
    for created in client.create_topics([short]).values():
        created.result(60)
    eventually(lambda: topic_admin.retention_s(real_run.kafka, short.topic) == 7200.0, 60, "two hours")
    assert topic_admin.retention_s(real_run.kafka, f"{real_run.name}-none") is None


def test_partitions_of_a_run_never_change(real_run: RealRun) -> None:
    provisioning.apply(real_run.kafka, real_run.topics, real_run.name)
    with pytest.raises(TopicError, match="has 2 partitions, the configuration says 3; the number is fixed"):
        provisioning.plan(real_run.kafka, replace(real_run.topics, partitions=3), real_run.name)


@pytest.mark.parametrize("flags", [(), ("--scale",)])
def test_a_demo_refuses_a_run_that_has_topics_and_leaves_them(
    real_run: RealRun, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """As with ROLLSTREAM_RUN and an address in the environment: at its end a demo deletes the topics of its run."""
    real_run.prepare()
    address = real_run.kafka.bootstrap_servers
    refused = answer_of(tmp_path, "demo", *flags, "--run", real_run.name, "-b", address, "--data", str(tmp_path / "d"))
    assert refused.returncode == 2
    assert f"run {real_run.name} at {address} has {len(CATALOGUE)} topics already" in refused.stderr
    assert len(provisioning.describe(real_run.kafka, real_run.name)) == len(CATALOGUE)


def test_a_missing_topic_is_named_with_the_remedy(real_run: RealRun) -> None:
    with pytest.raises(TopicError, match=rf"{real_run.name}.rollouts is missing .*rollstream topics apply"):
        list(read_to_end(real_run.kafka, real_run.topic("rollouts")))


def test_more_replicas_than_brokers_are_refused_at_once(real_run: RealRun) -> None:
    with pytest.raises(TopicError, match=r"cannot be created: .*replication factor"):
        provisioning.apply(real_run.kafka, replace(real_run.topics, replication_factor=3), real_run.name)


def test_a_topic_is_read_to_where_it_ends_and_from_where_asked(real_run: RealRun) -> None:
    provisioning.apply(real_run.kafka, real_run.topics, real_run.name)
    for number in range(5):
        real_run.send_bytes("metrics", str(number).encode(), b"k", 0)
    topic = real_run.topic("metrics")
    assert [m.value for m in read_to_end(real_run.kafka, topic)] == [b"0", b"1", b"2", b"3", b"4"]
    assert [m.value for m in read_to_end(real_run.kafka, topic, start=3)] == [b"3", b"4"]
    assert list(read_to_end(real_run.kafka, real_run.topic("evals"))) == []
    with pytest.raises(TopicError, match="position is no longer in the log"):
        list(read_to_end(real_run.kafka, topic, start=99))


def test_records_lie_on_the_partition_their_key_says(real_run: RealRun) -> None:
    from rollstream.topics.wire.keys import partition_of
    from tests.support.runs import rollout

    provisioning.apply(real_run.kafka, real_run.topics, real_run.name)
    real_run.send([rollout(f"x{i}") for i in range(20)])
    messages = list(read_to_end(real_run.kafka, real_run.topic("rollouts")))
    assert len(messages) == 20
    assert {m.partition for m in messages} == {0, 1}
    assert all(m.partition == partition_of(m.key or b"", 2) for m in messages)


def test_an_unknown_topic_name_lists_the_known_ones() -> None:
    with pytest.raises(Exception, match="there is no topic 'rolouts'; topics are rollouts, batches"):
        spec_of("rolouts")
