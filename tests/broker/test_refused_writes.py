"""Permissions taken away while a role works: the write that is refused names user, operation, topic and remedy."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.deployment.access_rules import AUDIT, access_rules
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import DeliveryError
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.recovering_sender import RecoveringSender
from rollstream.topics.kafka.sender import Delivery, Failure, Sender, SendFailed
from rollstream.topics.kafka.transactions import TransactionalProducer, TransactionFailed
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from tests.support.command_line import answer_of, in_full
from tests.support.runs import rollout
from tests.support.secured_broker import SecuredBroker, secured_broker
from tests.support.waiting import eventually

pytestmark = pytest.mark.long  # a broker with users of its own; the short form has that of test_doctor

RUN = "guarded"
PLAIN = ("env", "gateway", "infer", "eval", "label", "collect")
"""Roles that write outside transactions."""
TRANSACTIONAL = {"group": (("batches", "journal"), "grouper/0"), "learn": (("steps",), "learner")}
"""Roles that write in transactions: topics of one, and the transactional id."""
USERS = (*PLAIN, *TRANSACTIONAL, AUDIT)


@dataclass(frozen=True)
class Guarded:
    """A run with the users of its roles, each with its own rules."""

    broker: SecuredBroker
    folder: Path

    def kafka(self, role: str) -> KafkaConfig:
        """Settings of the connection of a role's user."""
        client = self.broker.client(f"{RUN}-{role}", "")
        address = client.pop("bootstrap.servers")
        password = self.folder / "password"
        return KafkaConfig(bootstrap_servers=address, client={**client, "sasl.password": f"file:{password}"})

    def written(self, role: str) -> str:
        """A topic to which a role may write."""
        rules = access_rules(RunConfig(run=RUN), role)
        return next(rule.name for rule in rules if rule.resource == "topic" and "Write" in rule.operations)

    def forbid(self, role: str, topic: str) -> None:
        """Remove the rule that allows a role to write to a topic."""
        admin = AdminClient({"bootstrap.servers": self.broker.open})
        rule = AclBindingFilter(
            ResourceType.TOPIC,
            topic,
            ResourcePatternType.LITERAL,
            f"User:{RUN}-{role}",
            None,
            AclOperation.WRITE,
            AclPermissionType.ALLOW,
        )
        for future in admin.delete_acls([rule]).values():
            assert len(future.result(60)) == 1


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "password").write_text("the password")
    with secured_broker(folder / "broker") as broker:
        roles = [word for role in USERS for word in ("--role", role)]
        for words in (("topics", "apply"), ("topics", "acls", "apply", *roles)):
            answer = answer_of(folder, *words, "--run", RUN, "-b", broker.open)
            assert answer.returncode == 0, answer.stderr
        broker.add_users({f"{RUN}-{role}": "the password" for role in USERS})
        yield Guarded(broker, folder)


def refused(error: str, role: str, topic: str) -> bool:
    """Whether an error is one line that names the user, the operation, the topic and the remedy."""
    text = (
        f"user {RUN}-{role} may not Write to topic {topic} (TOPIC_AUTHORIZATION_FAILED); `rollstream topics acls plan` "
        "shows the rule that is missing, and `rollstream topics acls apply` adds it"
    )
    return error.endswith(text) and "\n" not in error


@pytest.mark.parametrize("role", PLAIN)
def test_a_record_that_is_refused_while_a_role_runs_names_the_missing_rule(guarded: Guarded, role: str) -> None:
    topic = guarded.written(role)
    sender = Sender(clients.producer(guarded.kafka(role)))
    sender.send(topic, b"before", b"key", partition=0)
    sender.flush(120)
    guarded.forbid(role, topic)

    errors: list[str] = []

    def is_refused() -> bool:
        try:
            sender.send(topic, b"after", b"key", partition=0)
            sender.flush(120)
        except DeliveryError as error:
            errors.append(str(error))
        return bool(errors)

    eventually(is_refused, 120, "a refused record")
    assert refused(errors[0], role, topic), errors


ALL_REFUSED = (
    f"user {RUN}-{AUDIT} may not Write to topic {RUN}.control, nor to any other (CLUSTER_AUTHORIZATION_FAILED); "
    "connect as a user that may, such as the user of `operate` (docs/security.md#permissions)"
)
RECORDS, PRODUCERS = 3, 50
"""A client reports its fatal error while a record is sent or afterwards; several clients do both."""


def test_a_user_who_may_write_nothing_is_told_so_once_for_all_records(guarded: Guarded) -> None:
    for _ in range(PRODUCERS):
        sender = Sender(clients.producer(guarded.kafka(AUDIT)))
        with pytest.raises(SendFailed) as refused:
            send_and_flush(sender)
        assert ALL_REFUSED in str(refused.value)
        # The first error ends the loop; a record that was queued before it may fail after it.
        names = [failure.name for failure in refused.value.failures] + told_by_flush(sender)
        assert len(set(names)) == len(names) <= RECORDS, names
        assert told_by_flush(sender) == []


def told_by_flush(sender: Sender) -> list[str]:
    """Names of the records that `flush` reports as failed."""
    try:
        sender.flush(10)
    except SendFailed as failed:
        return [failure.name for failure in failed.failures]
    return []


def send_and_flush(sender: Sender) -> None:
    """Send a few records."""
    with sender:
        for number in range(RECORDS):
            sender.send(f"{RUN}.control", b"value", b"key", partition=0, name=f"record {number}")


def test_each_record_of_a_user_who_may_write_nothing_is_reported(guarded: Guarded) -> None:
    for _ in range(PRODUCERS):
        failures: list[Failure] = []
        sender = Sender(clients.producer(guarded.kafka(AUDIT)), on_failure=failures.append)
        for number in range(RECORDS):
            try:
                sender.send(f"{RUN}.control", b"value", b"key", partition=0, name=f"record {number}")
            except SendFailed as refused:
                failures += refused.failures
        sender.flush(120)
        assert sorted(failure.name for failure in failures) == [f"record {number}" for number in range(RECORDS)]
        assert {failure.reason for failure in failures} == {ALL_REFUSED}


def test_a_process_that_began_without_the_right_to_write_goes_on_once_it_has_it(guarded: Guarded) -> None:
    topic, user = f"{RUN}.control", f"User:{RUN}-{AUDIT}"
    failures: list[Failure] = []
    delivered: list[Delivery] = []
    sender = RecoveringSender(guarded.kafka(AUDIT), on_failure=failures.append)

    def sent() -> bool:
        try:
            sender.send(topic, b"value", b"key", partition=0, on_delivery=delivered.append)
        except SendFailed as refused:
            failures.extend(refused.failures)
        sender.poll(0.1)
        return bool(delivered)

    eventually(lambda: sent() or len(failures) > 1, 120, "refused records")
    assert {failure.reason for failure in failures} == {ALL_REFUSED}
    admin = AdminClient({"bootstrap.servers": guarded.broker.open})
    where = ResourceType.TOPIC, topic, ResourcePatternType.LITERAL, user
    [added] = admin.create_acls([AclBinding(*where, "*", AclOperation.WRITE, AclPermissionType.ALLOW)]).values()
    added.result(60)
    try:
        eventually(sent, 120, "a delivered record")
    finally:
        guarded.forbid(AUDIT, topic)


def write(producer: TransactionalProducer, *topics: str) -> None:
    """Write a record to each of these topics, in one transaction."""
    with producer.transaction() as transaction:
        for topic in topics:
            transaction.send(topic, b"value", b"key", partition=0)
        transaction.flush(120)


@pytest.mark.parametrize("role", TRANSACTIONAL)
def test_a_transaction_that_is_refused_while_a_role_runs_names_the_missing_rule(guarded: Guarded, role: str) -> None:
    names, identity = TRANSACTIONAL[role]
    topics = [f"{RUN}.{name}" for name in names]
    producer = TransactionalProducer(guarded.kafka(role), f"{RUN}/{identity}")
    with closing(producer):
        producer.start()
        write(producer, *topics)
        guarded.forbid(role, topics[-1])

        errors: list[TransactionFailed] = []

        def is_refused() -> bool:
            try:
                write(producer, *topics)
            except TransactionFailed as error:
                errors.append(error)
            return bool(errors)

        eventually(is_refused, 120, "a refused transaction")
    assert errors[0].refused
    # A record that is refused names its topic; a transaction that fails before it is sent names all of them.
    assert any(refused(str(errors[0]), role, named) for named in (topics[-1], " or ".join(topics))), errors


def test_a_grouping_process_that_is_refused_ends_and_names_the_missing_rule(guarded: Guarded) -> None:
    topic = f"{RUN}.journal"
    answer = answer_of(
        guarded.folder, "topics", "acls", "apply", "--role", "group", "--run", RUN, "-b", guarded.broker.open
    )
    assert answer.returncode == 0, answer.stderr
    kafka = guarded.kafka("group")
    settings = [word for name, value in kafka.client.items() for word in ("-X", f"{name}={value}")]
    command = ("group", "--run", RUN, "-b", kafka.bootstrap_servers, *settings)
    log = guarded.folder / "group.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rollstream", *in_full(command)], stdout=out, stderr=out
        )
    try:
        eventually(lambda: "task_restored" in log.read_text() or process.poll() is not None, 300, "a restored task")
        guarded.forbid("group", topic)
        sender = Sender(clients.producer(KafkaConfig(bootstrap_servers=guarded.broker.open)))

        def ended() -> bool:
            record = rollout("after")
            sender.send(f"{RUN}.rollouts", encode(record), encode_key(record.environment, record.example_id))
            sender.flush(120)
            return process.poll() is not None

        eventually(ended, 300, "the end of the process")
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 2
    last = log.read_text().splitlines()[-1]
    assert last.startswith(f"rollstream: transaction {RUN}/grouper/0 is refused: "), last
    # Records of other tests here become dead letters, which may be in the same transaction.
    assert refused(last, "group", topic) or refused(last, "group", f"{RUN}.dead-letters or {topic}"), last
