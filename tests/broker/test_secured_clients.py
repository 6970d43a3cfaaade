"""Clients of a secured broker: passwords, tokens and certificates work, and each fault is one line of a command."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from rollstream.pipeline.deployment.description import ROLES
from tests.support.certificates import Authority
from tests.support.command_line import answer_of
from tests.support.secured_broker import SecuredBroker, secured_broker

pytestmark = pytest.mark.long  # a broker with users of its own; the short form has that of test_doctor

RUN = "secured"
ASK = ("topics", "describe")
"""The command that is given the shortest way to the brokers."""


@dataclass(frozen=True)
class Connections:
    """Ways to connect to a secured broker, right and wrong, as settings of librdkafka."""

    broker: SecuredBroker
    folder: Path

    def password(self, text: str = "the password") -> dict[str, str]:
        file = self.folder / f"{text}.txt"
        file.write_text(text)
        return {**self.broker.client(f"{RUN}-operate", ""), "sasl.password": f"file:{file}"}

    def certificate(self, name: str, days: int = 2) -> dict[str, str]:
        pair = self.broker.signer.issue(name, days=days)
        own = {"ssl.certificate.location": str(pair.certificate), "ssl.key.location": str(pair.key)}
        return {**self.tls(self.broker.certified), **own}

    def token(self, principal: str) -> dict[str, str]:
        token = {"enable.sasl.oauthbearer.unsecure.jwt": "true", "sasl.oauthbearer.config": f"principal={principal}"}
        return {
            **self.tls(self.broker.secured),
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "OAUTHBEARER",
            **token,
        }

    def tls(self, address: str) -> dict[str, str]:
        return {
            "bootstrap.servers": address,
            "security.protocol": "SSL",
            "ssl.ca.location": str(self.broker.authority),
        }

    def faults(self) -> dict[str, tuple[Mapping[str, str], str]]:
        """Faults by name: how a client connects, and a pattern of the line that says why it cannot."""
        good, another = self.password(), Authority(self.folder, "another-authority")
        return {
            "a wrong password": (self.password("a guess"), "refuse the credentials of user secured-operate"),
            "another authority": (
                {**good, "ssl.ca.location": str(another.certificate)},
                "is not accepted: unable to get",
            ),
            "an expired certificate": ({**good, "bootstrap.servers": self.broker.expired}, "certificate has expired"),
            "plaintext to TLS": ({"bootstrap.servers": self.broker.secured}, "speak TLS, but security.protocol"),
            "TLS to plaintext": ({**good, "bootstrap.servers": self.broker.open}, "do not speak TLS"),
            "no certificate": (self.tls(self.broker.certified), "require a client certificate"),
            "an expired client": (self.certificate("late", days=-1), "refuse this client's certificate"),
            "another mechanism": ({**good, "sasl.mechanism": "PLAIN"}, "Unsupported SASL mechanism"),
        }


FAULTS = (
    "a wrong password",
    "another authority",
    "an expired certificate",
    "plaintext to TLS",
    "TLS to plaintext",
    "no certificate",
    "an expired client",
    "another mechanism",
)


@pytest.fixture(scope="module")
def connections(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connections]:
    folder = tmp_path_factory.mktemp("connections")
    with secured_broker(folder / "broker") as broker:
        broker.add_users({f"{RUN}-operate": "the password"})
        for words in (("topics", "apply"), ("topics", "acls", "apply")):
            assert answer_of(folder, *words, "--run", RUN, "-b", broker.open).returncode == 0
        yield Connections(broker, folder)


def flags(client: Mapping[str, str]) -> list[str]:
    return ["--run", RUN, *(word for key, value in client.items() for word in ("-X", f"{key}={value}"))]


def test_passwords_tokens_and_certificates_let_a_user_in(connections: Connections, tmp_path: Path) -> None:
    mine = ("--set", "topics.principal=User:CN={run}-{role}", "-b", connections.broker.open, "--run", RUN)
    assert answer_of(tmp_path, "topics", "acls", "apply", "--role", "operate", *mine).returncode == 0
    for client in (
        connections.password(),
        connections.token(f"{RUN}-operate"),
        connections.certificate(f"{RUN}-operate"),
    ):
        answer = answer_of(tmp_path, *ASK, *flags(client))
        assert answer.returncode == 0, answer.stderr
        assert f"{RUN}.rollouts" in answer.stdout


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_clear_line(connections: Connections, tmp_path: Path, fault: str) -> None:
    client, pattern = connections.faults()[fault]
    check(tmp_path, ASK, client, pattern)


def check(folder: Path, words: tuple[str, ...], client: Mapping[str, str], pattern: str) -> None:
    """Assert that a command ends with one line that says what the pattern says."""
    answer = answer_of(folder, *words, *flags(client))
    lines = [line for line in answer.stderr.splitlines() if not line.startswith("{")]
    assert (answer.returncode, len(lines)) == (2, 1), answer.stderr
    assert lines[0].startswith("rollstream: ")
    assert re.search(pattern, lines[0])
    assert "the password" not in answer.stderr
    assert "a guess" not in answer.stderr


def test_a_missing_permission_is_told_from_a_missing_topic(connections: Connections, tmp_path: Path) -> None:
    mine = flags(connections.token("nobody"))
    for words in (("ledger",), ("cat", "rollouts"), ("topics", "describe")):
        answer = answer_of(tmp_path, *words, *mine)
        assert answer.returncode == 2
        assert "lacks a permission on the topic" in answer.stderr
    answer = answer_of(tmp_path, "cat", "rollouts", "-b", connections.broker.open, "--run", "no-such-run")
    assert answer.returncode == 2
    assert "is missing" in answer.stderr


WITHOUT_A_RUN = ("engine", "fill", "collect", "serve-weights")
"""Roles that speak to more than the brokers when they start."""
COMMANDS = (
    *((*role.command, *role.flags) for role in ROLES if role.name not in WITHOUT_A_RUN),
    ("topics", "plan"),
    ("topics", "apply"),
    ("topics", "acls", "plan"),
    ("runs",),
    ("ledger",),
    ("verify",),
    ("lineage", "--offset", "0:0"),
    ("top", "--once"),
    ("cat", "rollouts"),
    ("dlq", "ls"),
    ("weights", "ls"),
    ("prune", "--dry-run"),
    ("doctor",),
    ("replay",),
    ("weights", "export", "-o", "somewhere"),
    ("steer", "learner", "retire", "default"),
    ("steer", "stop"),
    ("steer", "evaluate"),
    ("steer", "scale", "group=2"),
    ("steer", "exclude", "--env", "a"),
)
"""Commands that speak to Kafka, one of each kind."""


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_says_so(connections: Connections, tmp_path: Path, words: tuple[str, ...]) -> None:
    client, pattern = connections.faults()["a wrong password"]
    check(tmp_path, words, client, pattern)
