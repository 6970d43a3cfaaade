"""A real broker with a plaintext listener whose clients may do everything, and others with TLS and users.

Users have passwords, tokens or certificates, and only the access that they are given; what is denied stands in the
broker's log.
"""

import re
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

from rollstream.infra.broker.launch_commands import prepare
from rollstream.infra.broker.ports import free_ports
from rollstream.infra.broker.providers import choose_local
from rollstream.infra.config import BrokerConfig, BrokerLayout
from tests.support.certificates import HOST, Authority, Pair
from tests.support.kafka_versions import running_broker
from tests.support.waiting import eventually

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
    """Address of the listener with TLS and users: passwords (SCRAM) and unsigned tokens (OAUTHBEARER)."""
    certified: str
    """Address of the listener whose users are certificates."""
    expired: str
    """Address of a listener like `secured` whose own certificate is out of date."""
    authority: Path
    """Certificate that clients of the three trust."""
    signer: Authority
    """Signs the certificates of users."""
    log: Path

    def add_users(self, passwords: Mapping[str, str]) -> None:
        """Make users with their passwords (SCRAM), or change the passwords."""
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
        matches = re.findall(
            r"Principal = User:(\S+) is Denied operation = (\w+) .*? on resource = (\S+)",
            self.log.read_text(errors="replace"),
        )
        return set(matches)


@contextmanager
def secured_broker(directory: Path) -> Iterator[SecuredBroker]:
    """Run a secured broker."""
    layout = BrokerLayout(root=directory)
    directory.mkdir(parents=True)
    authority = Authority(directory)
    port, secured, certified, expired, controller = free_ports(HOST, 5)
    listeners = {"ROLES": ("SASL_SSL", secured), "CERTIFIED": ("SSL", certified), "EXPIRED": ("SASL_SSL", expired)}
    protocols = {"PLAINTEXT": "PLAINTEXT", "CONTROLLER": "PLAINTEXT", **{n: p for n, (p, _) in listeners.items()}}
    properties = {
        "listener.security.protocol.map": ",".join(f"{name}:{protocol}" for name, protocol in protocols.items()),
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "false",
        "super.users": "User:ANONYMOUS",
        "sasl.enabled.mechanisms": f"{MECHANISM},OAUTHBEARER",
        **_identity("ssl", authority.issue("broker")),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.certificates": _in_one_line(authority.certificate),
        "listener.name.certified.ssl.client.auth": "required",
        **_identity("listener.name.expired.ssl", authority.issue("expired-broker", days=-1)),
    }
    for listener in ("roles", "expired"):
        properties |= {
            f"listener.name.{listener}.{MECHANISM.lower()}.sasl.jaas.config": (
                "org.apache.kafka.common.security.scram.ScramLoginModule required;"
            ),
            f"listener.name.{listener}.oauthbearer.sasl.jaas.config": (
                "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required"
                ' unsecuredLoginStringClaim_sub="broker";'
            ),
        }
    config = BrokerConfig(data_dir=directory, properties=properties)
    command = prepare(choose_local("java"), config, layout, port=port, controller_port=controller).command
    text = layout.properties.read_text()
    more = "".join(f",{name}://{HOST}:{own_port}" for name, (_, own_port) in listeners.items())
    for name in ("listeners", "advertised.listeners"):
        text = re.sub(rf"^({name}=.*)$", rf"\1{more}", text, flags=re.MULTILINE)
    # The writer of properties has escaped the line ends that PEM in one line needs.
    layout.properties.write_text(text.replace("\\\\n", "\\n"))
    with running_broker(command, layout.log, port):
        yield SecuredBroker(
            open=f"{HOST}:{port}",
            secured=f"{HOST}:{secured}",
            certified=f"{HOST}:{certified}",
            expired=f"{HOST}:{expired}",
            authority=authority.certificate,
            signer=authority,
            log=layout.log,
        )


def _identity(prefix: str, pair: Pair) -> dict[str, str]:
    return {
        f"{prefix}.keystore.type": "PEM",
        f"{prefix}.keystore.certificate.chain": _in_one_line(pair.certificate),
        f"{prefix}.keystore.key": _in_one_line(pair.key),
    }


def _known(admin: AdminClient, names: list[str]) -> bool:
    answers = admin.describe_user_scram_credentials(names).values()
    return all(future.exception(60) is None for future in answers)


def _in_one_line(pem: Path) -> str:
    return pem.read_text().strip().replace("\n", "\\n")
