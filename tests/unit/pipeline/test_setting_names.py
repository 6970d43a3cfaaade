"""Each setting has one name in three forms: in a file, as a variable and as a flag."""

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from rollstream.pipeline.config import RunConfig, load
from rollstream.pipeline.run.plan import child_environment
from rollstream.pipeline.settings import known_keys, plain, variable_of
from rollstream.topics.errors import ConfigurationError

BASE = """
[[environments]]
use = "add"
name = "sums"
"""
"""A list of environments, so that there is an entry whose settings can be set."""


def defaults() -> Mapping[str, Any]:
    """Every key with its default; a table of free keys has one such key."""
    return {key.removesuffix("*") + "word" * key.endswith("*"): default_of(key) for key in known_keys(RunConfig)}


def default_of(key: str) -> Any:
    if key.endswith(".*"):
        return "text"
    value: Any = load(flags=["environments.0.use=add"])
    for part in key.split("."):
        value = value[int(part)] if part.isdecimal() else getattr(value, part)
    return plain(value)


def outcome(loading: Callable[[], RunConfig]) -> RunConfig | str:
    """The configuration, or what is wrong with it without the place where it is set."""
    try:
        return loading()
    except ConfigurationError as error:
        return str(error).partition(": ")[2]


def toml_of(key: str, value: Any) -> str:
    """A document that sets one key."""
    *sections, name = key.split(".")
    if "environments" in sections:
        rest = sections[sections.index("0") + 1 :]
        return BASE + "".join(f"[environments.{part}]\n" for part in rest) + tomli_w.dumps({name: value})
    document: dict[str, Any] = {name: value}
    for section in reversed(sections):
        document = {section: document}
    return tomli_w.dumps(document) + ("" if key == "environments" else BASE)


@pytest.mark.long
def test_every_setting_is_set_alike_by_a_file_a_variable_and_a_flag(tmp_path: Path) -> None:
    base = tmp_path / "base.toml"
    base.write_text(BASE)
    file = tmp_path / "run.toml"
    compared, unlike = 0, []
    for key, value in defaults().items():
        if value is None or (key.startswith("environments.0.") and key.endswith((".use", ".name"))):
            continue  # None has no text form; the entry above has these two keys
        text = tomli_w.dumps({"value": value}, indent=0).removeprefix("value = ").replace("\n", "")
        text = value if isinstance(value, str) else text
        file.write_text(toml_of(key, value))
        by_variable = outcome(lambda: load(base, environment={variable_of(key): text}))  # noqa: B023
        by_flag = outcome(lambda: load(base, flags=[f"{key}={text}"]))  # noqa: B023
        by_file = outcome(lambda: load(file))
        compared += 1
        if not by_variable == by_flag == by_file or "unknown key" in str(by_flag):
            unlike.append((key, by_variable, by_flag, by_file))
    assert unlike == []
    assert compared > 200


def test_a_variable_of_a_section_sets_the_setting_of_that_name() -> None:
    environment = {"ROLLSTREAM_GROUPING__BATCH_ROLLOUTS": "32", "ROLLSTREAM_RUN": "named", "ROLLSTREAM_DATA_DIR": "/d"}
    config = load(environment=environment)
    assert (config.grouping.batch_rollouts, config.run, config.data_dir) == (32, "named", Path("/d"))
    assert variable_of("learner.weights.chunk_bytes") == "ROLLSTREAM_LEARNER__WEIGHTS__CHUNK_BYTES"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("ROLLSTREAM_GROUPING_BATCH_ROLLOUTS", "did you mean ROLLSTREAM_GROUPING__BATCH_ROLLOUTS?"),
        ("ROLLSTREAM_GATEWAY_PORT", "did you mean ROLLSTREAM_GATEWAY__PORT?"),
        ("ROLLSTREAM_RUNS", "did you mean ROLLSTREAM_RUN?"),
        ("ROLLSTREAM_HOME", "use ROLLSTREAM_SECTION__NAME."),
        ("ROLLSTREAM_GROUPING__BATCHROLLOUTS", "unknown key grouping.batchrollouts; did you mean grouping.batch_roll"),
    ],
)
def test_a_variable_that_is_no_setting_is_refused_with_the_nearest_one(name: str, says: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        load(environment={name: "1"})
    assert str(refused.value).startswith(name)
    assert says in str(refused.value)


def test_variables_that_are_for_something_else_are_left_alone() -> None:
    others = {
        "ROLLSTREAM_READY_FD": "3",
        "ROLLSTREAM_LIFELINE_FD": "4",
        "ROLLSTREAM_LISTEN_FD": "5",
        "ROLLSTREAM_REGISTRY": "/runs/main/processes.json",
        "ROLLSTREAM_EPISODE_7f3a": "key",
        "PATH": "/",
    }
    # As Kubernetes sets them for services called rollstream-infer and rollstream.
    services = {
        "ROLLSTREAM_INFER_SERVICE_HOST": "10.0.0.1",
        "ROLLSTREAM_INFER_SERVICE_PORT_HTTP": "80",
        "ROLLSTREAM_INFER_PORT": "tcp://10.0.0.1:80",
        "ROLLSTREAM_INFER_PORT_80_TCP_ADDR": "10.0.0.1",
        "ROLLSTREAM_SERVICE_HOST": "10.0.0.2",
        "ROLLSTREAM_PORT": "tcp://10.0.0.2:80",
    }
    assert load(environment={**others, **services}) == load()
    secret = {"ROLLSTREAM_JUDGE_KEY": "canary", "ROLLSTREAM_WORKER__API_KEY": "env:ROLLSTREAM_JUDGE_KEY"}
    assert load(environment=secret).worker.api_key == "env:ROLLSTREAM_JUDGE_KEY"
    kept = child_environment(load(environment=secret), {**others, **services, **secret})
    assert kept == {**others, **services, "ROLLSTREAM_JUDGE_KEY": "canary"}


def test_processes_of_a_run_inherit_no_variable_that_sets_a_setting() -> None:
    both = {"ROLLSTREAM_LEARNER__NAME": "a", "ROLLSTREAM_RUN": "c", "HOME": "/root"}
    both |= {"KAFKA_BOOTSTRAP_SERVERS": "h:1", "ROLLSTREAM_WORKER__API_KEY": "canary"}
    assert child_environment(load(environment=both), both).keys() == {"HOME", "ROLLSTREAM_WORKER__API_KEY"}


def test_a_command_names_the_variable_that_is_no_setting() -> None:
    command = [sys.executable, "-P", "-m", "rollstream", "ledger"]
    answer = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={"ROLLSTREAM_LEARNER_NAME": "a"}, check=False
    )
    assert answer.returncode == 2
    expected = "rollstream: ROLLSTREAM_LEARNER_NAME does not set a setting; did you mean ROLLSTREAM_LEARNER__NAME?"
    assert answer.stderr.startswith(expected)
    assert answer.stderr.count("\n") == 1
