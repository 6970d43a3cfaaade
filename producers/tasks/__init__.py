"""The single-turn tasks that come with rollstream, by name."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rollstream.producers.config import TasksConfig
from rollstream.producers.tasks.addition import Addition
from rollstream.producers.tasks.digit_sorting import DigitSorting
from rollstream.producers.tasks.gsm8k import Gsm8k
from rollstream.producers.tasks.reasoning_gym_dataset import ReasoningGymDataset
from rollstream.producers.tasks.task import Task
from rollstream.topics.errors import ConfigurationError

__all__ = ["TASKS", "Task", "create_task"]


def _gsm8k(settings: TasksConfig, **options: Any) -> Task:
    return Gsm8k("gsm8k", replace(settings.gsm8k, **options))


def _chain_sum(_settings: TasksConfig, **options: Any) -> Task:
    sums = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    given = {"size": 2000, "config": sums, "question_pattern": ": (.*)", "max_tokens": 8, **options}
    return ReasoningGymDataset("chain_sum", **given)


TASKS: Mapping[str, Callable[..., Task]] = {
    "dsort3": lambda _settings: DigitSorting("dsort3", digits=3),
    "dsort4": lambda _settings: DigitSorting("dsort4", digits=4),
    "add": lambda _settings: Addition("add"),
    "gsm8k": _gsm8k,
    "chain_sum": _chain_sum,
}
"""Function that makes each task, from the common settings of tasks and the task's own options."""


def create_task(name: str, settings: TasksConfig | None = None, **options: Any) -> Task:
    """Return the task with this name. Raises ConfigurationError with the nearest name if there is none."""
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, 1)
        hint = f"did you mean {near[0]!r}?" if near else ""
        raise ConfigurationError(f"no task is named {name!r}; tasks are {', '.join(TASKS)} {hint}".rstrip())
    return TASKS[name](settings or TasksConfig(), **options)
