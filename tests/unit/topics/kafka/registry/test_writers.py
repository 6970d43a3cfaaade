"""Writers that no registry answers: records are written without ids, none waits again, and settings keep secrets."""

import logging
import time

import pytest

from rollstream.consumers.grouping.testing import example_rollout
from rollstream.infra.broker.ports import free_port
from rollstream.topics.config import RegistryConfig
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.kafka.registry.client import RegistryClient
from rollstream.topics.kafka.registry.writers import SchemaIds
from rollstream.topics.wire.codec import encode, framed_for_registry

VALUE = encode(example_rollout("a"))


@pytest.fixture
def nobody() -> RegistryConfig:
    """The address of a registry that does not run."""
    return RegistryConfig(url=f"http://127.0.0.1:{free_port('127.0.0.1')}", timeout_s=30.0)


def test_records_go_without_ids_while_no_registry_answers(
    nobody: RegistryConfig, caplog: pytest.LogCaptureFixture
) -> None:
    ids = SchemaIds(nobody)
    with caplog.at_level(logging.WARNING):
        assert ids.framed("main.rollouts", VALUE) == VALUE
    assert "schema_id_unknown" in caplog.text
    caplog.clear()
    began = time.monotonic()
    for _ in range(1000):
        assert ids.framed("main.rollouts", VALUE) == VALUE
        assert ids.framed("main.evals", VALUE) == VALUE
    assert time.monotonic() - began < nobody.timeout_s
    assert "schema_id_unknown" not in caplog.text, "a line for each record would drown the log"


def test_the_framing_of_another_registry_stays_where_there_is_no_id(nobody: RegistryConfig) -> None:
    restored = framed_for_registry(VALUE, 9)
    assert SchemaIds(nobody).framed("main.rollouts", restored) == restored


@pytest.mark.parametrize("topic", ["main.weights", "main.dead-letters", "main.batches", "a-topic-of-others"])
def test_nobody_is_asked_about_bytes_that_are_no_records_of_the_topic(
    nobody: RegistryConfig, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    ids = SchemaIds(nobody)
    for value in (VALUE, b"\xc3\x01 and so on", b"", framed_for_registry(VALUE, 9)):
        assert ids.framed(topic, value) == value
    assert caplog.text == ""


def test_credentials_in_the_address_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"set kafka\.registry\.username"):
        RegistryConfig(url="https://main:secret@registry.example.com")


def test_a_password_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_PASSWORD", raising=False)
    config = RegistryConfig(url="https://registry.example.com", username="main", password="env:NO_SUCH_PASSWORD")
    with pytest.raises(ConfigurationError, match="export NO_SUCH_PASSWORD"):
        RegistryClient(config)


def test_an_address_that_is_none_is_a_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match=r"kafka\.registry"):
        RegistryClient(RegistryConfig(url="registry.example.com"))
