"""Recipes of demos: each suits its task, and states the gain that it promises."""

from pathlib import Path

import pytest

from rollstream.pipeline.cli import build_parser
from rollstream.pipeline.command_parser import config_of
from rollstream.pipeline.config import RunConfig, load
from rollstream.pipeline.environments import environments_of
from rollstream.pipeline.run.length_checks import check_lengths
from rollstream.pipeline.run.warm_start import demonstrated, warm_start_examples
from rollstream.topics.errors import ConfigurationError
from tests.support.paths import ROOT

RECIPES = sorted((ROOT / "pipeline" / "recipes").glob("*.toml"))


def demo(*flags: str) -> RunConfig:
    """The settings of `rollstream demo` with these flags."""
    return config_of(build_parser(load=["demo"]).parse_args(["demo", *flags]))


def test_a_task_has_its_own_recipe_or_that_of_the_default_task() -> None:
    assert demo().mixture[0].use == "dsort3"
    assert (demo("--task", "add").mixture[0].use, demo("--task", "add").learner) == ("add", demo().learner)
    sums = demo("--task", "chain_sum", "--seed", "4", "--steps", "7")
    assert sums.mixture[0].use == "chain_sum"
    assert (sums.seed, sums.learner.max_steps) == (4, 7)
    assert sums.learner.model.hidden_size > demo().learner.model.hidden_size


def test_a_file_of_settings_replaces_the_recipe(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text('task = "dsort4"')
    assert demo("--task", "chain_sum", "--config", str(own)).mixture[0].options == {}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_suits_its_task(path: Path) -> None:
    config = load(path)
    environments = environments_of(config)
    assert [environment.entry.use for environment in environments] == [path.stem]
    check_lengths(config, environments)
    longest = max(len(tokens) for tokens, _mask in warm_start_examples(config))
    assert longest <= config.learner.sequence_length
    # Room for the gain above what the warm start may have taught.
    share = demonstrated(environments)
    assert share is not None
    assert config.demo.gain <= config.demo.target
    assert environments[0].prompts("heldout")


def test_a_gain_that_cannot_be_reached_is_refused(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text("[demo]\ntarget = 0.5\ngain = 0.6\n")
    with pytest.raises(ConfigurationError, match=r"demo.gain is 0.6"):
        load(own)
