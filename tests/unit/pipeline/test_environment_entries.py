"""Entries `[[environments]]` of the configuration: from files, variables and flags, by number and by name."""

import re
import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.pipeline.config import RunConfig, load, to_toml
from rollstream.pipeline.roles.env import worker_name
from rollstream.pipeline.run.learner_start import warm_start_examples
from rollstream.pipeline.run.run_environments import environments_of
from rollstream.producers.config import EnvironmentConfig
from rollstream.topics.errors import ConfigurationError

TWO = """
[[environments]]
use = "dsort3"
weight = 2

[[environments]]
name = "hard-sums"
use = "my_sums.py:Sums"
group_size = 8

[environments.options]
digits = 4
signs = ["+", "-"]
nested = {deep = {er = 1.5}}
"""


@pytest.fixture
def two(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(TWO, encoding="utf-8")
    return path


def test_a_run_without_entries_plays_the_one_that_task_names() -> None:
    assert load(flags=["task=my_envs:Mine"]).mixture == (EnvironmentConfig(use="my_envs:Mine"),)


def test_entries_come_in_their_order_with_options_of_any_type(two: Path) -> None:
    config = load(two)
    assert (
        config.mixture
        == config.environments
        == (
            EnvironmentConfig(use="dsort3", weight=2.0),
            EnvironmentConfig(
                name="hard-sums",
                use="my_sums.py:Sums",
                group_size=8,
                options={"digits": 4, "signs": ["+", "-"], "nested": {"deep": {"er": 1.5}}},
            ),
        )
    )
    assert config.capacity.group_size == 16, "the largest"


def test_a_written_configuration_loads_to_an_equal_one(two: Path, tmp_path: Path) -> None:
    config = load(two)
    again = tmp_path / "again.toml"
    again.write_text(to_toml(config), encoding="utf-8")
    assert load(again) == config


values = st.recursive(
    st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1), inner, max_size=3),
    max_leaves=8,
)
names = st.text(string.ascii_lowercase + "_", min_size=1).filter(lambda n: not n.endswith(("secret", "password")))


@settings(max_examples=60)
@given(options=st.lists(st.dictionaries(names, values, max_size=4), min_size=1, max_size=3))
def test_any_options_survive_toml(options: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> None:
    entries = tuple(EnvironmentConfig(use="a:B", options=table) for table in options)
    path = tmp_path_factory.mktemp("toml") / "run.toml"
    path.write_text(to_toml(RunConfig(environments=entries)), encoding="utf-8")
    assert load(path).environments == entries


def test_flags_change_entries_by_number_and_by_name_and_add_new_ones(two: Path) -> None:
    config = load(
        two,
        flags=[
            "environments.0.weight=0.5",
            "environments.hard-sums.options.digits=5",
            "environments.hard-sums.options.word=plain text",
            "environments.dsort3.quota=0.25",
            "environments.2.use=add",
        ],
    )
    first, second, third = config.environments
    assert (first.weight, first.quota) == (0.5, 0.25)
    assert second.options["digits"] == 5
    assert second.options["word"] == "plain text"
    assert second.options["nested"] == {"deep": {"er": 1.5}}
    assert third == EnvironmentConfig(use="add")


def test_a_flag_with_a_list_replaces_all_entries(two: Path) -> None:
    config = load(two, flags=['environments=[{use = "add"}]'])
    assert config.environments == (EnvironmentConfig(use="add"),)


def test_variables_name_entries_without_case_and_signs(two: Path) -> None:
    config = load(
        two,
        environment={
            "ROLLSTREAM_ENVIRONMENTS__HARD_SUMS__GROUP_SIZE": "4",
            "ROLLSTREAM_ENVIRONMENTS__1__OPTIONS__MOST_DIGITS": "7",
        },
    )
    assert config.environments[1].group_size == 4
    assert config.environments[1].options["most_digits"] == 7


def test_variables_add_more_than_ten_entries() -> None:
    variables = {f"ROLLSTREAM_ENVIRONMENTS__{number}__NAME": f"e{number}" for number in range(12)}
    uses = {f"ROLLSTREAM_ENVIRONMENTS__{number}__USE": "add" for number in range(12)}
    config = load(environment=variables | uses)
    assert [entry.name for entry in config.environments] == [f"e{number}" for number in range(12)]


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("environments.0.wieght=2", r"--set environments.0.wieght: unknown key .*did you mean environments.0.weight\?"),
        ("environments.1.otions.x=2", r"did you mean environments.1.options\?"),
        ("environments.hardsums.weight=2", "environments has no entry 'hardsums'.*did you mean hard-sums?"),
        ("environments.5.use=add", "there are: dsort3, hard-sums.*the next new entry is environments.2"),
        ("environments.2.weight=2", "use is missing"),
        ("environments.0.weight=-1", "weight is -1.0; it must be at least 0"),
        ("environments.0.quota=2", "quota is 2.0; it must be above 0 and at most 1"),
        ("environments.0.weight=much", "environments.0.weight expects a number"),
        ("environments=3", r"environments is a list of tables.*\[\[environments\]\]"),
        ("environments.0.options.api_key=1234", "api_key is a secret"),
        ("environments.0=3", "a list of tables"),
    ],
)
def test_a_wrong_entry_is_refused_with_the_remedy(two: Path, flag: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load(two, flags=[flag])


def test_a_wrong_key_of_a_file_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[[environments]]\nuse = "add"\n\n[[environments]]\nuse = "dsort3"\nquota = 3\n', encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"run.toml:6: \[environments.1\] quota is 3"):
        load(path)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["environments.1.after=['ad']"], "dsort3 comes after 'ad', which does not exist; did you mean 'add'?"),
        (["environments.1.after=['add']", "environments.0.after=['dsort3']"], "add, dsort3 wait for each other"),
    ],
)
def test_lessons_that_nothing_unlocks_are_refused(flags: list[str], message: str) -> None:
    config = load(flags=["environments.0.use=add", "environments.1.use=dsort3", *flags])
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        environments_of(config)


def test_environments_of_weight_0_are_evaluated_and_no_worker_plays_them() -> None:
    flags = ["environments.0.use=add", "environments.1.use=dsort3", "environments.1.weight=0"]
    config = load(flags=flags)
    assert [each.name for each in environments_of(config) if each.evaluated] == ["add", "dsort3"]
    assert [each.name for each in environments_of(config, 0)] == ["add"]
    taught, alone = ([t.tolist() for t, _mask in warm_start_examples(c)] for c in (config, load(flags=flags[:1])))
    assert taught == alone
    for wrong, message in {
        "environments.0.weight=0": "the weight of each of environments is 0",
        "environments.0.after=['dsort3']": "add comes after dsort3, whose weight 0 means that it is never played",
        "environments.1.evaluate=false": "environment dsort3 has weight 0, so it is only evaluated, but",
    }.items():
        with pytest.raises(ConfigurationError, match=re.escape(message)):
            environments_of(load(flags=[*flags, wrong]))


def test_greedy_evaluations_have_one_sample() -> None:
    for flag in ("evaluation.samples=4", "environments.0.samples=4"):
        flags = ["environments.0.use=add", flag]
        with pytest.raises(ConfigurationError, match=r"samples 4 answers for each prompt of add .* set a temperature"):
            load(flags=flags)
        load(flags=[*flags, "evaluation.temperature=1"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["collect.processes=1", "collect.player=a:b"], "run of a control task, which plays no environments"),
        (["fill.directory=windows"], "run of a control task, which plays no environments"),
        (["environments.1.after=['add']"], "dsort3 comes after add, whose rewards come from a labeler"),
    ],
)
def test_what_cannot_be_had_with_rewards_from_a_labeler_is_refused(flags: list[str], message: str) -> None:
    labeled = ["environments.0.use=add", "environments.0.rewards=labeler", "environments.1.use=dsort3"]
    environments_of(load(flags=labeled))
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        environments_of(load(flags=[*labeled, *flags]))


def test_evaluations_leave_out_environments_that_know_no_rewards() -> None:
    labeled = ["environments.0.use=add", "environments.0.rewards=labeler", "environments.1.use=dsort3"]
    assert [e.name for e in environments_of(load(flags=labeled)) if e.evaluated] == ["dsort3"]


def test_each_worker_plays_the_entries_that_have_so_many_workers() -> None:
    config = load(flags=["environments.0.use=add", "environments.0.workers=1", "environments.1.use=dsort3"])
    assert [[e.name for e in environments_of(config, ordinal)] for ordinal in (0, 1)] == [["add", "dsort3"], ["dsort3"]]


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ((), ["env-0", "env-1"]),
        (("worker.worker_id=node7",), ["node7-0", "node7-1"]),
        (("worker.worker_id=node7", "supervisor.workers=1"), ["node7", "node7"]),
    ],
)
def test_a_configured_name_of_a_worker_is_kept(flags: tuple[str, ...], names: list[str]) -> None:
    config = load(flags=flags)
    assert [worker_name(config, ordinal) for ordinal in (0, 1)] == names


def test_a_worker_without_anything_to_play_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="the last worker has nothing to play"):
        load(flags=["environments.0.use=add", "environments.0.workers=1"])


def test_a_value_that_replaces_a_table_of_an_earlier_layer_leaves_the_fault_of_another_setting_named() -> None:
    options = ["environments.0.use=dsort3", "environments.0.options.a.b=1", "environments.0.options.a=3"]
    assert load(flags=options).environments[0].options == {"a": 3}
    with pytest.raises(ConfigurationError, match=r"^--set service\.port: .*service\.port is -1; it must be a port"):
        load(flags=["service.port=-1", *options])
