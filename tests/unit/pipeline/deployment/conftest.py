"""Fixtures of tests of deployments."""

import pytest


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KAFKA_BOOTSTRAP_SERVERS", "ROLLSTREAM_RUN"):
        monkeypatch.delenv(name, raising=False)
