"""A registry behind HTTPS: which clients are let in, and the messages to others.

tests/broker/test_schema_registry.py tests the registry itself.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rollstream.infra.broker.ports import free_port
from rollstream.topics.config import RegistryConfig
from rollstream.topics.errors import RegistryUnavailable, SchemaRefused
from rollstream.topics.kafka.registry.client import RegistryClient
from rollstream.topics.kafka.registry.subjects import subject_of
from tests.support.https_front import HttpsFront, https_front

PASSWORD = "a-word-that-nobody-says"


@pytest.fixture
def nobody() -> str:
    """The address of a registry that does not run."""
    return f"http://127.0.0.1:{free_port('127.0.0.1')}/apis/ccompat/v7"


@pytest.fixture
def front(tmp_path: Path, nobody: str) -> Iterator[HttpsFront]:
    with https_front(tmp_path, nobody, "main", PASSWORD) as running:
        yield running


@pytest.fixture
def config(front: HttpsFront, monkeypatch: pytest.MonkeyPatch) -> RegistryConfig:
    monkeypatch.setenv("REGISTRY_PASSWORD", PASSWORD)
    return RegistryConfig(
        url=front.url, username="main", password="env:REGISTRY_PASSWORD", ca=str(front.authority), timeout_s=60.0
    )


def refusal(config: RegistryConfig, error: type[Exception]) -> str:
    """Return the message that a user gets who asks for an id."""
    subject = subject_of(config, "main.rollouts", "Rollout")
    assert subject is not None
    with RegistryClient(config) as client, pytest.raises(error) as raised:
        client.id_of(subject, subject.versions[-1])
    assert PASSWORD not in str(raised.value)
    return str(raised.value)


def test_the_right_user_passes_and_what_lies_behind_is_asked(config: RegistryConfig, front: HttpsFront) -> None:
    assert "502" in refusal(config, RegistryUnavailable)
    assert len(front.passed) == 1
    assert front.refused == []


def test_another_password_is_a_refusal_that_names_the_settings(
    config: RegistryConfig, front: HttpsFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGISTRY_PASSWORD", "another")
    assert "check kafka.registry.username and password" in refusal(config, SchemaRefused)
    assert front.passed == []


def test_a_server_of_an_unknown_authority_is_not_told_the_password(config: RegistryConfig, front: HttpsFront) -> None:
    assert "kafka.registry.ca" in refusal(replace(config, ca=""), RegistryUnavailable)
    assert (front.passed, front.refused) == ([], [])


def test_a_client_without_the_certificate_that_is_asked_for_reads_which_setting_it_lacks(
    config: RegistryConfig, tmp_path: Path, nobody: str
) -> None:
    (tmp_path / "mutual").mkdir()
    with https_front(tmp_path / "mutual", nobody, "main", PASSWORD, clients_have_certificates=True) as front:
        settings = replace(config, url=front.url, ca=str(front.authority))
        assert "kafka.registry.certificate" in refusal(settings, RegistryUnavailable)
        assert front.passed == []
        assert "502" in refusal(replace(settings, certificate=str(front.client)), RegistryUnavailable)
        assert len(front.passed) == 1


def test_a_client_that_is_closed_asks_nothing_more(config: RegistryConfig, front: HttpsFront) -> None:
    subject = subject_of(config, "main.rollouts", "Rollout")
    assert subject is not None
    client = RegistryClient(config)
    client.close()
    with pytest.raises(RegistryUnavailable):
        client.id_of(subject, subject.versions[-1])
    assert front.passed == []


def test_a_mistake_of_ours_is_not_taken_for_a_registry_that_is_down(
    nobody: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RegistryConfig(url=nobody)
    subject = subject_of(config, "main.rollouts", "Rollout")
    assert subject is not None

    def mistaken(_schema: object) -> str:
        raise TypeError("a mistake")

    monkeypatch.setattr("rollstream.topics.kafka.registry.client.registered_text", mistaken)
    with RegistryClient(config) as client, pytest.raises(TypeError, match="a mistake"):
        client.id_of(subject, subject.versions[-1])
