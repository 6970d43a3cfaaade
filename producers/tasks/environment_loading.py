"""Loads the environments that a run's entries name: built-in, installed, or from users' own files.

Calls the named class with the entry's options; the result must follow one of the two environment protocols.
"""

import difflib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from typing import Any, overload

from rollstream.producers.config import EnvironmentConfig, TasksConfig, WorkerConfig
from rollstream.producers.environments.chat import schemas_of
from rollstream.producers.environments.environment import (
    AgentEnvironment,
    Conversation,
    Environment,
    Episode,
    Generate,
    Prompt,
    Split,
)
from rollstream.producers.tasks import TASKS, create_task
from rollstream.producers.tasks.choices import Choices
from rollstream.producers.tasks.coding import Coding
from rollstream.producers.tasks.formulas import Formulas
from rollstream.producers.tasks.number_guessing import NumberGuessing
from rollstream.producers.tasks.question_file import QuestionFile
from rollstream.producers.tasks.reasoning_gym_dataset import ReasoningGymDataset
from rollstream.producers.tasks.tool_use import ToolUse
from rollstream.producers.tasks.verifiers_environment import VerifiersEnvironment
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.secrets import resolve_options
from rollstream.topics.user_code import load_object
from rollstream.topics.wire.validation import NAME_LIMIT

ENTRY_POINTS = "rollstream.environments"
"""Group of entry points in which installed packages name their environments."""
_OPENENV = "openenv"
_CLASSES: Mapping[str, type] = {
    "choices": Choices,
    "coding": Coding,
    "formulas": Formulas,
    "guess": NumberGuessing,
    "jsonl": QuestionFile,
    "reasoning-gym": ReasoningGymDataset,
    "tools": ToolUse,
    "verifiers": VerifiersEnvironment,
}
BUILT_IN = (*TASKS, *_CLASSES, _OPENENV)
"""Names of the environments that come with rollstream."""


class LazyPrompts(Sequence[Prompt]):
    """Prompts that a class with a length and an index makes when they are asked for; nothing is kept."""

    def __init__(self, items: Any) -> None:
        """`items` needs `__len__` and, for indices from 0 up to its length, `__getitem__`."""
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...

    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        # A range knows negative indices and bounds, which `items` need not know.
        places = range(len(self))[index]
        return self._items[places] if isinstance(places, int) else tuple(self._items[place] for place in places)


@dataclass(frozen=True, kw_only=True)
class LoadedEnvironment:
    """An environment with the settings of its entry. This class also follows the protocol Environment."""

    environment: Environment | AgentEnvironment
    name: str
    max_tokens: int
    stop: tuple[str, ...]
    group_size: int
    temperature: float
    entry: EnvironmentConfig

    @property
    def agent(self) -> AgentEnvironment | None:
        """The environment if it calls the policy itself, else None."""
        return self.environment if hasattr(self.environment, "play") else None  # type: ignore[return-value]

    @property
    def awaits_label(self) -> bool:
        """Whether the rewards of its rollouts come from a labeler."""
        return self.entry.rewards == "labeler"

    @property
    def evaluated(self) -> bool:
        """Whether evaluations play it; never if its rewards come from a labeler."""
        return self.entry.evaluate and not self.awaits_label

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """Return the prompts of a split.

        Raises ConfigurationError if they are not a sequence of Prompts of texts, if there are none to train on, or if
        two share an id.
        """
        prompts = self.environment.prompts(split)
        if isinstance(prompts, Mapping) or not (hasattr(prompts, "__len__") and hasattr(prompts, "__getitem__")):
            raise ConfigurationError(
                f"environment {self.name} returns a {type(prompts).__name__} from prompts({split!r}); return a list of "
                "rollstream.Prompt"
            )
        if not isinstance(prompts, list | tuple):
            prompts = LazyPrompts(prompts)
        if len(prompts) == 0 and split == "train":
            raise ConfigurationError(f"environment {self.name} has no prompts to train on; prompts('train') is empty")
        names: set[str] = set()
        for index in range(len(prompts)):
            prompt = prompts[index]
            if problem := _prompt_problem(prompt):
                raise ConfigurationError(f"environment {self.name}: prompts({split!r})[{index}] {problem}")
            if prompt.example_id in names:
                raise ConfigurationError(
                    f"environment {self.name} has two prompts with the example_id {prompt.example_id!r} in split "
                    f"{split}; give each prompt a different example_id"
                )
            names.add(prompt.example_id)
        return prompts

    async def run(self, prompt: Prompt, generate: Generate) -> Episode:
        """Play one episode. Raises ConfigurationError if the environment calls the policy itself."""
        if self.agent is not None:
            raise ConfigurationError(
                f"environment {self.name} calls the policy over HTTP, which is not possible here; give it a method run"
            )
        return await self.environment.run(prompt, generate)  # type: ignore[union-attr]

    @property
    def demonstrated(self) -> float | None:
        """Share of its warm-start examples that show a right answer; None if the environment does not state it."""
        share = getattr(self.environment, "demonstrated", None)
        return share if isinstance(share, float | int) else None

    def warm_start_examples(self, seed: int, n: int) -> list[tuple[str, str]]:
        """Return at most `n` pairs of prompt and answer that teach the format; none if the environment offers none."""
        offered = getattr(self.environment, "warm_start_examples", None)
        return list(offered(seed, n)) if offered else []

    def warm_start_conversations(self, seed: int, n: int) -> list[Conversation]:
        """Return at most `n` conversations that teach the format; none if the environment offers none.

        Functions among their tools are described, as in an episode. Raises ConfigurationError for one that cannot be.
        """
        offered = getattr(self.environment, "warm_start_conversations", None)
        return [replace(each, tools=schemas_of(each.tools)) for each in (offered(seed, n) if offered else ())]


def load_environments(
    entries: Sequence[EnvironmentConfig], worker: WorkerConfig, settings: TasksConfig | None = None
) -> tuple[LoadedEnvironment, ...]:
    """Load the environments of these entries; `worker` supplies the values that an entry does not set.

    Raises ConfigurationError, naming the entry, if one cannot be loaded or two have the same name.
    """
    loaded: dict[str, LoadedEnvironment] = {}
    for entry in entries:
        environment = with_settings(create_environment(entry, settings), worker, entry)
        if environment.name in loaded:
            raise ConfigurationError(
                f"two environments are named {environment.name!r}; give one of them another name in [[environments]]"
            )
        loaded[environment.name] = environment
    return tuple(loaded.values())


def with_settings(
    environment: Environment | AgentEnvironment, worker: WorkerConfig, entry: EnvironmentConfig | None = None
) -> LoadedEnvironment:
    """Return an environment with the settings of its entry; `worker` supplies the values that the entry does not set.

    Raises ConfigurationError if the environment does not follow the protocol, or calls the policy itself and cannot
    follow a setting.
    """
    entry = entry or EnvironmentConfig(use=type(environment).__name__)
    _check(environment, entry.use)
    if entry.rewards == "labeler" and hasattr(environment, "play"):
        raise ConfigurationError(
            f"environment {entry.name or environment.name} calls the policy itself, so its rewards cannot come from a "
            'labeler: set its rewards to "environment", and call the judge in its method play'
        )
    if entry.max_tokens and hasattr(environment, "play"):
        raise ConfigurationError(
            f"environment {entry.name or environment.name} calls the policy itself, so it limits its replies itself: "
            "leave max_tokens out of its entry, and set it in the entry's options if its class takes it there"
        )
    return LoadedEnvironment(
        environment=environment,
        name=entry.name or environment.name,
        max_tokens=entry.max_tokens or environment.max_tokens,
        stop=_stop_texts(environment, entry.use),
        group_size=entry.group_size or worker.group_size,
        temperature=entry.temperature or worker.temperature,
        entry=entry,
    )


def create_environment(entry: EnvironmentConfig, settings: TasksConfig | None = None) -> Environment | AgentEnvironment:
    """Make the environment that an entry names. Raises ConfigurationError if it cannot be made."""
    options = resolve_options("options", entry.options)
    if entry.use in TASKS:
        return _called(entry.use, create_task, options, entry.use, settings)
    if entry.use in _CLASSES:
        return _called(entry.use, _CLASSES[entry.use], options)
    # Imported here, because a learner loads environments, too, and their HTTP client reads all certificates.
    if entry.use == _OPENENV:
        from rollstream.producers.tasks.openenv_environment import OpenEnvEnvironment

        return _called(entry.use, OpenEnvEnvironment, options)
    if entry.use.startswith(("http://", "https://")):
        from rollstream.producers.tasks.remote_environment import remote_environment

        return _called(entry.use, remote_environment, options, entry.use)
    if ":" not in entry.use:
        return _called(entry.use, _plug_in(entry.use), options)
    factory = load_object(entry.use, "environments: use is", "name it package.module:Class")
    return _called(entry.use, factory, options)


def _plug_in(name: str) -> Any:
    plug_ins: Mapping[str, EntryPoint] = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name in plug_ins:
        try:
            return plug_ins[name].load()
        except (ImportError, AttributeError) as error:
            raise ConfigurationError(f"environment {name} is installed but cannot be imported: {error}") from error
    names = [*BUILT_IN, *plug_ins]
    near = difflib.get_close_matches(name, names, 1)
    hint = f"did you mean {near[0]!r}?" if near else "name your own as package.module:Class or path/to/file.py:Class"
    raise ConfigurationError(f"no environment is named {name!r}; the known names are {', '.join(names)}; {hint}")


def _called(use: str, factory: Any, options: Mapping[str, Any], *before: Any) -> Environment | AgentEnvironment:
    if not callable(factory):
        raise ConfigurationError(f"environment {use} is a {type(factory).__name__}; name a class or a function")
    # Names only, because a value may be a secret.
    chosen = f"with the options {', '.join(options)}" if options else "without options"
    try:
        inspect.signature(factory).bind(*before, **options)
    except TypeError as error:
        raise ConfigurationError(
            f"environment {use} {chosen} cannot be made: {error}; it takes {inspect.signature(factory)}"
        ) from error
    except ValueError:
        pass  # a class without a signature, such as one written in C
    try:
        environment: Environment | AgentEnvironment = factory(*before, **options)
    except TypeError as error:
        raise ConfigurationError(f"environment {use} {chosen} cannot be made: {error}") from error
    return environment


def _prompt_problem(prompt: object) -> str:
    """Return why an object is no prompt that can be played and recorded, with the remedy; empty if it is one."""
    if not isinstance(prompt, Prompt):
        return f"is of type {type(prompt).__name__}; make it a rollstream.Prompt"
    name, text = prompt.example_id, prompt.text
    # One condition, because a dataset may have millions of prompts. The answer concerns nobody but the environment.
    if isinstance(name, str) and isinstance(text, str) and 0 < len(name) <= NAME_LIMIT:
        return ""
    for field, value in {"example_id": name, "text": text}.items():
        if not isinstance(value, str):
            return f"has {field} = {value!r}, of type {type(value).__name__}; make it a str"
    return f"has an example_id of {len(name)} characters; give it 1 to {NAME_LIMIT}"


def _stop_texts(environment: object, use: str) -> tuple[str, ...]:
    """Return the texts that end a turn. Raises ConfigurationError if an environment's `stop` is anything else."""
    stop = getattr(environment, "stop", ())
    texts = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Iterable) else (stop,)
    if not all(isinstance(text, str) for text in texts):
        raise ConfigurationError(
            f"environment {use} has stop = {stop!r}; set it to the texts that end a turn, e.g. ('\\n',), or leave it "
            "out"
        )
    return texts


def _check(environment: object, use: str) -> None:
    """Raise ConfigurationError, naming the first missing part, if an object is not an environment."""
    name = getattr(environment, "name", None)
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"environment {use} has no attribute `name`; give its class one, e.g. name = 'game'")
    max_tokens = getattr(environment, "max_tokens", None)
    if not isinstance(max_tokens, int) or max_tokens < 1:
        raise ConfigurationError(
            f"environment {use} has max_tokens = {max_tokens!r}; set it to the maximum number of tokens in a "
            "reply, e.g. 16"
        )
    if not callable(getattr(environment, "prompts", None)):
        raise ConfigurationError(f"environment {use} has no method prompts(split)")
    method = getattr(environment, "play", None) or getattr(environment, "run", None)
    if not inspect.iscoroutinefunction(method):
        raise ConfigurationError(
            f"environment {use} has no coroutine run(prompt, generate) or play(prompt, endpoint); write it with "
            "`async def`, or derive the class from rollstream.SingleTurn or rollstream.ChatEnvironment"
        )
