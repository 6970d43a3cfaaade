"""Permissions taken away while a role works: the write that is refused names user, operation, topic and remedy."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from confluent_kafka.admin import (
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.deployment.access_rules import access_rules
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import DeliveryError
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.sender import Sender
from tests.support.command_line import answer_of
from tests.support.secured_broker import SecuredBroker, secured_broker
from tests.support.waiting import eventually

RUN = "guarded"
PLAIN = ("env", "gateway", "infer", "eval", "label", "collect")
"""Roles that write outside transactions."""


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
        """Remove the rule by which a role writes to a topic."""
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
        roles = [word for role in PLAIN for word in ("--role", role)]
        for words in (("topics", "apply"), ("topics", "acls", "apply", *roles)):
            answer = answer_of(folder, *words, "--run", RUN, "-b", broker.open)
            assert answer.returncode == 0, answer.stderr
        broker.add_users({f"{RUN}-{role}": "the password" for role in PLAIN})
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
