"""An environment that verifiers refuses is named without its secrets; a stub stands in for the library."""

import sys
from types import ModuleType
from typing import Any

import pytest

from rollstream.producers.config import EnvironmentConfig
from rollstream.producers.tasks.environment_loading import create_environment
from rollstream.topics.errors import ConfigurationError


def refuse(settings: Any) -> None:
    raise ValueError(f"no field is named judge: {settings}")


@pytest.fixture(autouse=True)
def refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that refuses every environment, and quotes its settings."""
    names = ("verifiers", "verifiers.v1", "verifiers.v1.utils", "verifiers.v1.utils.loaders")
    library, version, utils, loaders = (ModuleType(name) for name in names)
    vars(library).update(v1=version)
    vars(version).update(load_environment=refuse)
    vars(loaders).update(resolve_env_config=lambda settings: settings)
    for name, module in zip(names, (library, version, utils, loaders), strict=True):
        monkeypatch.setitem(sys.modules, name, module)


def refusal(judge: Any) -> str:
    options = {"env": {"taskset": {"id": "t"}, "judge": judge}}
    with pytest.raises(ConfigurationError) as error:
        create_environment(EnvironmentConfig(use="verifiers", options=options))
    assert error.value.__cause__ is None
    assert error.value.__suppress_context__, "a traceback would show the library's text"
    return str(error.value)


@pytest.mark.parametrize("several", [False, True])
def test_a_refused_environment_shows_no_secret(monkeypatch: pytest.MonkeyPatch, several: bool) -> None:
    monkeypatch.setenv("JUDGE_KEY", "t0psecret")
    judge = {"model": "m", "api_key": "env:JUDGE_KEY"}
    text = refusal([judge] if several else judge)
    assert "t0psecret" not in text
    assert text.startswith("verifiers refuses the environment with the settings taskset, judge: ValueError, ")


def test_a_refused_environment_without_secrets_shows_why() -> None:
    assert "no field is named judge: {'taskset': {'id': 't'}, 'judge': {'model': 'm'}}" in refusal({"model": "m"})
