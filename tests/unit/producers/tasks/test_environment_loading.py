"""Environments of users: loaded by name, called with their options, refused with the part that is missing."""

import asyncio
import sys
from pathlib import Path

import pytest

from rollstream.producers.config import EnvironmentConfig, WorkerConfig
from rollstream.producers.tasks.environment_loading import LoadedEnvironment, load_environments
from rollstream.topics.errors import ConfigurationError

GAME = """
from rollstream import Episode, Message, Prompt, Score, SingleTurn


class Echo(SingleTurn):
    name = "echo"
    max_tokens = 4

    def __init__(self, words=("a",), api_key=""):
        self.words, self.api_key = words, api_key

    def prompts(self, split):
        return [Prompt(example_id=word, text=word + "?", answer=word) for word in self.words]

    def score(self, prompt, response_text, truncated):
        return Score(reward=float(response_text == prompt.answer))


class LazyPrompts:
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return Prompt(example_id="ab"[index % 2] + "x" * (index // 2), text=f"{index}?")


class Given(Echo):
    name = "given"

    def __init__(self, kind):
        self.kind = kind

    def prompts(self, split):
        good = Prompt(example_id="a", text="a?")
        return {
            "generator": (prompt for prompt in [good]),
            "lazy": LazyPrompts(),
            "dict": {"a": good},
            "texts": ["a?"],
            "int id": [good, Prompt(example_id=3, text="b?")],
            "no text": [good, Prompt(example_id="b", text=None)],
            "int text": [Prompt(example_id="b", text=4)],
            "empty id": [Prompt(example_id="", text="b?")],
            "long id": [Prompt(example_id="b" * 513, text="b?")],
        }[self.kind]


class Unstopped(Echo):
    stop = None


class Numbered(Echo):
    stop = (3,)


class Agent:
    name = "agent"
    max_tokens = 8

    def prompts(self, split):
        return [Prompt(example_id="1", text="go")]

    async def play(self, prompt, endpoint):
        return Score(reward=1.0)


class Nameless(Echo):
    name = ""


class Endless(Echo):
    max_tokens = 0


class NoPrompts:
    name, max_tokens = "no", 1


class NotAsync(Echo):
    def run(self, prompt, generate):
        return None


class Needy(Echo):
    def __init__(self, words):
        super().__init__(words)


class Broken(Echo):
    def __init__(self, **options):
        raise TypeError("no good")


number = 3
"""


@pytest.fixture
def game(tmp_path: Path) -> Path:
    path = tmp_path / "game.py"
    path.write_text(GAME, encoding="utf-8")
    return path


def loaded(use: str, **change: object) -> LoadedEnvironment:
    [environment] = load_environments([EnvironmentConfig(use=use, **change)], WorkerConfig())  # type: ignore[arg-type]
    return environment


def test_a_class_of_a_file_is_called_with_the_options_of_its_entry(game: Path) -> None:
    environment = loaded(
        f"{game}:Echo", name="mine", options={"words": ["x", "y"]}, max_tokens=9, group_size=3, temperature=0.5
    )
    assert [prompt.example_id for prompt in environment.prompts("train")] == ["x", "y"]
    assert (environment.name, environment.max_tokens, environment.group_size, environment.temperature) == (
        "mine",
        9,
        3,
        0.5,
    )
    assert environment.agent is None
    defaults = loaded(f"{game}:Echo")
    assert (defaults.name, defaults.max_tokens, defaults.group_size, defaults.stop) == ("echo", 4, 16, ())


def test_an_agent_is_told_from_an_environment_of_texts(game: Path) -> None:
    agent = loaded(f"{game}:Agent")
    assert agent.agent is agent.environment
    with pytest.raises(ConfigurationError, match="give it a method run"):
        asyncio.run(agent.run(agent.prompts("train")[0], None))  # type: ignore[arg-type]


def test_a_limit_that_an_agent_would_not_follow_is_refused(game: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"agent calls the policy itself.* set it in the entry's options"):
        loaded(f"{game}:Agent", max_tokens=4)
    assert loaded("tools", options={"max_tokens": 4}).max_tokens == 4


def test_a_secret_option_is_resolved_from_its_reference(game: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    environment = loaded(f"{game}:Echo", options={"api_key": "env:JUDGE_KEY"})
    assert environment.environment.api_key == "s3cret"  # type: ignore[union-attr]


@pytest.mark.parametrize("use", ["Echo", "Broken"])
def test_an_error_about_options_does_not_show_their_values(
    game: Path, use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "not to be seen")
    options = {"judge": {"api_key": "env:JUDGE_KEY"}, "wrods": ["a"]}
    with pytest.raises(ConfigurationError, match="with the options judge, wrods cannot be made") as error:
        loaded(f"{game}:{use}", options=options)
    assert "not to be seen" not in str(error.value)


def test_an_installed_package_names_environments_by_an_entry_point(
    game: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    information = tmp_path / "echo_games-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: echo-games\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[rollstream.environments]\necho = game:Echo\nlost = game:Lost\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert loaded("echo").name == "echo"
        with pytest.raises(ConfigurationError, match="lost is installed but cannot be imported"):
            loaded("lost")
        with pytest.raises(ConfigurationError, match=r"no environment is named 'ecko'.*did you mean 'echo'\?"):
            loaded("ecko")
    finally:
        sys.modules.pop("game", None)


def test_prompts_may_be_a_lazy_list(game: Path) -> None:
    prompts = loaded(f"{game}:Given", options={"kind": "lazy"}).prompts("train")
    assert [prompt.example_id for prompt in prompts] == ["a", "b"]
    assert [prompt.example_id for prompt in prompts[:1]] == ["a"]
    assert prompts[-1].example_id == "b"
    assert prompts[5:] == ()


@pytest.mark.parametrize(
    ("use", "options", "message"),
    [
        ("Echo", {"wrods": ["a"]}, "with the options wrods cannot be made: .*wrods.*it takes .*words"),
        ("Nameless", {}, "has no attribute `name`"),
        ("Endless", {}, "has max_tokens = 0"),
        ("NoPrompts", {}, r"has no method prompts\(split\)"),
        ("NotAsync", {}, "has no coroutine run"),
        ("Broken", {}, "no good"),
        ("Needy", {}, "without options cannot be made: .*words"),
        ("number", {}, "is a int; name a class"),
        ("Missing", {}, "has no attribute 'Missing'"),
        ("Unstopped", {}, r"Unstopped has stop = None; set it to the texts that end a turn"),
        ("Numbered", {}, r"Numbered has stop = \(3,\); set it to the texts that end a turn"),
        ("Given", {"kind": "generator"}, r"given returns a generator from prompts\('train'\); return a list"),
        ("Given", {"kind": "dict"}, r"given returns a dict from prompts\('train'\); return a list"),
        ("Given", {"kind": "texts"}, r"given: prompts\('train'\)\[0\] is of type str; make it a rollstream.Prompt"),
        ("Given", {"kind": "int id"}, r"given: prompts\('train'\)\[1\] has example_id = 3, of type int; make it a str"),
        ("Given", {"kind": "no text"}, r"prompts\('train'\)\[1\] has text = None, of type NoneType; make it a str"),
        ("Given", {"kind": "int text"}, r"prompts\('train'\)\[0\] has text = 4, of type int; make it a str"),
        ("Given", {"kind": "empty id"}, r"prompts\('train'\)\[0\] has an example_id of 0 characters; give it 1 to 512"),
        (
            "Given",
            {"kind": "long id"},
            r"prompts\('train'\)\[0\] has an example_id of 513 characters; give it 1 to",
        ),
        ("Echo", {"words": []}, "has no prompts to train on"),
        ("Echo", {"words": ["a", "a"]}, "two prompts with the example_id 'a'"),
    ],
)
def test_a_wrong_environment_is_refused_with_what_is_missing(
    game: Path, use: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        loaded(f"{game}:{use}", options=options).prompts("train")


def test_two_entries_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="two environments are named 'add'"):
        load_environments([EnvironmentConfig(use="add")] * 2, WorkerConfig())


@pytest.mark.parametrize("use", ["dsort3", "add", "guess"])
def test_built_in_environments_are_loaded_by_name(use: str) -> None:
    assert loaded(use).prompts("train")
