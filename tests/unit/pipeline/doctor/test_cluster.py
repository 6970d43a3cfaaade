"""What `rollstream doctor` says of the settings of brokers and of the topics that a user sees or does not."""

from typing import NoReturn

import pytest

from rollstream.pipeline.config import load
from rollstream.pipeline.doctor import retention
from rollstream.pipeline.doctor.cluster import check_topics, compared_settings
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import AccessDenied
from rollstream.topics.kafka import provisioning, topic_admin

RIGHT = {
    "group.min.session.timeout.ms": "1000",
    "group.max.session.timeout.ms": "1800000",
    "transaction.max.timeout.ms": "900000",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
    "offsets.retention.minutes": "2147483647",
    "auto.create.topics.enable": "false",
}


def test_brokers_with_the_settings_that_roles_need_are_right() -> None:
    for settings in (RIGHT, {}, {"group.min.session.timeout.ms": None}):
        assert [finding.level for finding in compared_settings(settings, KafkaConfig())] == ["ok"]


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        ("group.min.session.timeout.ms", "6001", "fault"),
        ("group.max.session.timeout.ms", "5999", "fault"),
        ("transaction.max.timeout.ms", "14999", "fault"),
        ("transaction.abort.timed.out.transaction.cleanup.interval.ms", "10000", "note"),
        ("offsets.retention.minutes", "10080", "note"),
        ("auto.create.topics.enable", "true", "note"),
    ],
)
def test_each_setting_of_the_brokers_that_differs_is_named_with_its_remedy(name: str, value: str, level: str) -> None:
    [finding] = compared_settings({**RIGHT, name: value}, KafkaConfig())
    assert (finding.level, finding.text.partition(":")[0]) == (level, f"{name} of the brokers is {value}")
    assert finding.remedy.startswith("set it to ")


def test_brokers_decide_on_sessions_under_the_consumer_protocol() -> None:
    settings = {**RIGHT, "group.min.session.timeout.ms": "60000"}
    assert [f.level for f in compared_settings(settings, KafkaConfig(group_protocol="consumer"))] == ["ok"]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who may not see settings of topics."""

    def plan(*_arguments: object) -> NoReturn:
        raise AccessDenied("describing topics of run main: this client's user lacks a permission on the topic")

    monkeypatch.setattr(provisioning, "plan", plan)


def test_a_user_without_rights_who_sees_no_topic_of_the_run_is_a_fault(
    refused: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_admin, "runs", lambda _kafka: {"other": {"rollouts": 4}})
    [fault] = check_topics(load(flags=["run=main"]), " --run main")
    assert (fault.level, fault.text.partition(":")[0]) == ("fault", "this user sees no topic of run main")
    assert fault.remedy.startswith("rollstream topics acls apply --run main")


def test_a_user_who_sees_some_topics_learns_of_their_partitions_all_the_same(
    refused: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {"rollouts": 4, "steps": 1}
    monkeypatch.setattr(topic_admin, "runs", lambda _kafka: {"main": there})
    assert [finding.level for finding in check_topics(load(flags=["run=main"]))] == ["note"]
    there["rollouts"] = 6
    fault, _note = check_topics(load(flags=["run=main"]))
    assert (fault.level, fault.text) == ("fault", "topic main.rollouts has 6 partitions, and the settings say 4")
    there["journal"] = 4
    fault, _note = check_topics(load(flags=["run=main"]), " --run main")
    assert fault.text.startswith("topic main.rollouts has 6 partitions, and the journal 4: keys have moved")


def test_a_retention_that_nobody_can_see_is_not_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_admin, "retention_s", lambda _kafka, _topic: None)
    monkeypatch.setattr(retention, "oldest_unfinished", lambda _config: iter(()))
    [note] = retention.check_retention(load(flags=["run=main"]))
    assert (note.level, "cannot be seen" in note.text) == ("note", True)
