"""Recipes of demos: each suits its task, and states the gain that it promises."""

from pathlib import Path

import pytest

from rollstream.consumers.learner.pretrained import tokenizer_of
from rollstream.pipeline.command_line.cli import build_parser
from rollstream.pipeline.command_line.command_parser import config_of
from rollstream.pipeline.config import RunConfig, load
from rollstream.pipeline.run.learner_start import check_lengths, demonstrated, warm_start_examples
from rollstream.pipeline.run.run_environments import environments_of
from rollstream.producers.inference.chat.selection import chat_template
from rollstream.topics.errors import ConfigurationError
from tests.support.paths import ROOT

RECIPES = [ROOT / "recipes" / task / "run.toml" for task in ("chain_sum", "choices", "coding", "dsort3", "tools")]


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


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.parent.name)
def test_a_recipe_suits_its_task(path: Path) -> None:
    config = load(path)
    environments = environments_of(config)
    assert [environment.entry.name or environment.entry.use for environment in environments] == [path.parent.name]
    check_lengths(config, environments)
    longest = max(len(tokens) for tokens, _mask in warm_start_examples(config))
    assert longest <= config.learner.sequence_length
    # Room for the gain above what the warm start may have taught.
    share = demonstrated(environments)
    assert share is not None
    assert config.demo.gain <= config.demo.target
    assert environments[0].prompts("heldout")


def test_an_episode_of_tools_fits_the_shorter_rows_and_the_model() -> None:
    config = demo("--task", "tools")
    [environment] = environments_of(config)
    tokenizer = tokenizer_of(config.learner)
    template = chat_template(config.inference.chat_template, tokenizer, config.learner.pretrained)
    conversations = environment.warm_start_conversations(config.seed, 64)
    calls = [tokenizer.encode(c.turn) for c in conversations if len(c.messages) == 1]
    assert calls
    assert max(map(len, calls)) < environment.max_tokens
    answers = [c for c in conversations if len(c.messages) > 1]
    prompts = [template.render([dict(m) for m in c.messages], [dict(t) for t in c.tools]) for c in answers]
    whole = max(len(prompt) + len(tokenizer.encode(c.turn)) + 1 for prompt, c in zip(prompts, answers, strict=True))
    assert whole <= min(config.learner.length_buckets)
    # The server takes a turn only if the longest answer would fit, too.
    assert max(map(len, prompts)) + environment.max_tokens <= config.inference.max_model_len


def test_a_gain_that_cannot_be_reached_is_refused(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text("[demo]\ntarget = 0.5\ngain = 0.6\n")
    with pytest.raises(ConfigurationError, match=r"demo.gain is 0.6"):
        load(own)
