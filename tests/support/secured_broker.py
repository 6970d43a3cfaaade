"""A real broker with two listeners: a plaintext one whose clients may do everything, and one with TLS and users.

Users have passwords (SCRAM) and only the access that they are given; what is denied stands in the broker's log.
"""

import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from rollstream.infra.config import BrokerConfig, BrokerLayout
from rollstream.infra.launch_commands import prepare
from rollstream.infra.ports import free_ports
from rollstream.infra.probe import broker_answers
from rollstream.infra.providers import choose_local
from tests.support.waiting import eventually

HOST = "127.0.0.1"
MECHANISM = "SCRAM-SHA-512"
_WORDS = re.compile(r"[A-Z]?[a-z]+")
_RESOURCES = {
    "topic": ResourceType.TOPIC,
    "group": ResourceType.GROUP,
    "transactionalId": ResourceType.TRANSACTIONAL_ID,
}


@dataclass(frozen=True)
class SecuredBroker:
    """Addresses of the listeners, and what its clients and tests need."""

    open: str
    """Address of the listener without security."""
    secured: str
    """Address of the listener with TLS and users."""
    authority: Path
    """Certificate that the secured listener's clients trust."""
    log: Path

    def add_users(self, passwords: Mapping[str, str]) -> None:
        """Make users with their passwords (SCRAM), or give them others."""
        admin = AdminClient({"bootstrap.servers": self.open})
        info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        made = [UserScramCredentialUpsertion(name, info, word.encode(), None) for name, word in passwords.items()]
        for future in admin.alter_user_scram_credentials(made).values():
            future.result(60)
        # The broker that answers may be behind the controller, which has them.
        names = list(passwords)
        eventually(lambda: _known(admin, names), 60, f"the broker to know {names}")

    def admit(self, users: Mapping[str, str], rules: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """Make users with their passwords, and rules as Strimzi's KafkaUsers have them, each with its user."""
        self.add_users(users)
        admin = AdminClient({"bootstrap.servers": self.open})
        bindings = [
            AclBinding(
                _RESOURCES[rule["resource"]["type"]],
                rule["resource"]["name"],
                ResourcePatternType[{"literal": "LITERAL", "prefix": "PREFIXED"}[rule["resource"]["patternType"]]],
                f"User:{user}",
                "*",
                AclOperation["_".join(_WORDS.findall(operation)).upper()],
                AclPermissionType.ALLOW,
            )
            for user, rule in rules
            for operation in rule["operations"]
        ]
        for future in admin.create_acls(bindings).values():
            future.result(60)

    def client(self, user: str, password: str) -> dict[str, str]:
        """Settings of librdkafka with which a user connects."""
        return {
            "bootstrap.servers": self.secured,
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": MECHANISM,
            "sasl.username": user,
            "sasl.password": password,
            "ssl.ca.location": str(self.authority),
        }

    @property
    def denied(self) -> set[tuple[str, str, str]]:
        """Denials so far: user, operation and resource."""
        found = re.findall(
            r"Principal = User:(\S+) is Denied operation = (\w+) .*? on resource = (\S+)",
            self.log.read_text(errors="replace"),
        )
        return set(found)


@contextmanager
def secured_broker(directory: Path) -> Iterator[SecuredBroker]:
    """Run such a broker."""
    layout, authority, key = BrokerLayout(root=directory), directory / "ca.crt", directory / "key.pem"
    directory.mkdir(parents=True)
    named = ["-subj", f"/CN={HOST}", "-addext", f"subjectAltName=IP:{HOST}", "-days", "2"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(authority)]
    subprocess.run([*made, *named], check=True, capture_output=True, timeout=120)
    port, secured, controller = free_ports(HOST, 3)
    protocols = "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,ROLES:SASL_SSL"
    properties = {
        "listener.security.protocol.map": protocols,
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "false",
        "super.users": "User:ANONYMOUS",
        "sasl.enabled.mechanisms": "SCRAM-SHA-512",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.certificate.chain": _in_one_line(authority),
        "ssl.keystore.key": _in_one_line(key),
        "listener.name.roles.scram-sha-512.sasl.jaas.config": (
            "org.apache.kafka.common.security.scram.ScramLoginModule required;"
        ),
    }
    config = BrokerConfig(data_dir=directory, properties=properties)
    command = prepare(choose_local("java"), config, layout, port=port, controller_port=controller).command
    text = layout.properties.read_text()
    for name in ("listeners", "advertised.listeners"):
        text = re.sub(rf"^({name}=.*)$", rf"\1,ROLES://{HOST}:{secured}", text, flags=re.MULTILINE)
    # The writer of properties has escaped what one line of PEM needs.
    layout.properties.write_text(text.replace("\\\\n", "\\n"))
    with layout.log.open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            eventually(
                lambda: broker_answers(HOST, port) or process.poll() is not None, 180, "the secured broker to answer"
            )
            assert process.poll() is None, layout.log.read_text()[-3000:]
            yield SecuredBroker(f"{HOST}:{port}", f"{HOST}:{secured}", authority, layout.log)
        finally:
            process.terminate()
            try:
                process.wait(60)
            finally:
                process.kill()


def _known(admin: AdminClient, names: list[str]) -> bool:
    answers = admin.describe_user_scram_credentials(names).values()
    return all(future.exception(60) is None for future in answers)


def _in_one_line(pem: Path) -> str:
    return pem.read_text().strip().replace("\n", "\\n")
