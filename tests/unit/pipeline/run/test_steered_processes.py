"""Numbers of processes that operators want, for the configuration of a run."""

from pathlib import Path

import pytest

from rollstream.pipeline.config import RunConfig, load
from rollstream.pipeline.deployment.description import counts, role_of
from rollstream.pipeline.run.plan import process_spec
from rollstream.pipeline.run.steered_processes import begin_with, with_numbers
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.records import DesiredProcesses
from rollstream.topics.steering import DesiredState


def wanted(**numbers: int) -> DesiredState:
    return DesiredState({role: DesiredProcesses(role=role, processes=number) for role, number in numbers.items()})


def begun(config: RunConfig, **numbers: int) -> tuple[dict[str, int], list[str]]:
    text: list[str] = []
    return counts(begin_with(config, wanted(**numbers), text.append)), text


def test_a_run_begins_with_the_numbers_that_are_wanted_and_others_are_as_configured() -> None:
    config = load()
    before = counts(config)
    numbers, lines = begun(config, env=3, group=1)
    assert (numbers, lines) == (before | {"env": 3, "group": 1}, [])


def test_more_grouping_processes_than_partitions_are_never_begun() -> None:
    assert begun(load(flags=["topics.partitions=3"]), group=9)[0]["group"] == 3


def test_a_number_that_the_capacity_has_no_room_for_is_told_and_the_others_hold() -> None:
    config = load()
    with pytest.raises(ConfigurationError, match="rollouts be outstanding"):
        with_numbers(config, {"env": 512})
    numbers, lines = begun(config, env=512, group=1)
    assert (numbers["env"], numbers["group"]) == (counts(config)["env"], 1)
    assert len(lines) == 1
    assert "env=512 is not followed: max_policy_lag" in lines[0]


def test_gateways_and_evaluators_follow_numbers_where_the_run_has_them() -> None:
    config = load(flags=["gateway.port=8100", "evaluation.every_versions=10"])
    numbers, lines = begun(config, gateway=3, eval=2)
    assert (numbers["gateway"], numbers["eval"], lines) == (3, 2, [])
    assert not {"gateway", "eval"} & begun(load(), gateway=3, eval=2)[0].keys()
    ports = [process_spec(config, Path("run.toml"), role_of("gateway"), number).arguments[-1] for number in (1, 2)]
    assert ports == ["gateway.port=8101", "gateway.port=8102"]
    names = [process_spec(config, Path("run.toml"), role_of("eval"), number).name for number in (0, 1)]
    assert names == ["eval", "eval-1"]


def test_a_role_that_the_run_does_not_have_stays_out() -> None:
    config = load(flags=['worker.inference_urls=["http://127.0.0.1:9/v1"]'])
    assert "infer" not in begun(config, infer=2)[0]
