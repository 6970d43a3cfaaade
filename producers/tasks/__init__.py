"""The tasks that come with rollstream, by name."""

import difflib
from collections.abc import Callable

from producers.config import TasksConfig
from producers.tasks.addition import Addition
from producers.tasks.digit_sorting import DigitSorting
from producers.tasks.gsm8k import Gsm8k
from producers.tasks.task import Task
from topics.errors import ConfigurationError

__all__ = ["TASKS", "Task", "create_task"]

TASKS: dict[str, Callable[[TasksConfig], Task]] = {
    "dsort3": lambda _: DigitSorting("dsort3", digits=3),
    "dsort4": lambda _: DigitSorting("dsort4", digits=4),
    "add": lambda _: Addition("add"),
    "gsm8k": lambda settings: Gsm8k("gsm8k", settings.gsm8k),
}


def create_task(name: str, settings: TasksConfig | None = None) -> Task:
    """The task of that name. Raises ConfigurationError, naming the nearest, when there is none."""
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, 1)
        hint = f"did you mean {near[0]!r}?" if near else ""
        raise ConfigurationError(f"no task is called {name!r}; tasks are {', '.join(TASKS)} {hint}".rstrip())
    return TASKS[name](settings or TasksConfig())
