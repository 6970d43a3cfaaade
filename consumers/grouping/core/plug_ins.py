"""Makers and estimators that a configuration may name: the built-in ones, and users' code that the process imports.

A configuration is read from the log, and permission to write to the log must not suffice to import code into a process.
Therefore its names are only looked up. A process only imports what its settings grouper.makers and grouper.estimators
name.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from rollstream.consumers.grouping.config import GrouperConfig
from rollstream.consumers.grouping.core.estimators import ESTIMATORS, Estimator, Outcomes
from rollstream.consumers.grouping.makers.batch_maker import (
    BatchMaker,
    FifoBatchMaker,
    MakerContext,
    PairsBatchMaker,
    SftBatchMaker,
)
from rollstream.consumers.grouping.makers.reservoir import ReservoirBatchMaker
from rollstream.topics.errors import ConfigurationError, StateRefused
from rollstream.topics.user_code import load_object

MakerFactory = Callable[[MakerContext], BatchMaker]
MAKERS: dict[str, MakerFactory] = {
    "fifo": FifoBatchMaker,
    "reservoir": ReservoirBatchMaker,
    "sft": SftBatchMaker,
    "pairs": PairsBatchMaker,
}


def is_user_maker(name: str) -> bool:
    """Whether a name refers to a user's maker: package.module:Class or path/to/file.py:Class."""
    return ":" in name


def load_makers(names: Iterable[str]) -> dict[str, MakerFactory]:
    """Import makers by name, package.module:Class or path/to/file.py:Class, and add them to MAKERS.

    Raises ConfigurationError for a malformed name, a module that cannot be imported, or an object that is not a
    BatchMaker.
    """
    return {**MAKERS, **{name: _imported_maker(name) for name in names}}


def batch_maker(name: str, context: MakerContext, makers: Mapping[str, MakerFactory] = MAKERS) -> BatchMaker:
    """Return a new maker by its name in `makers`. Raises ConfigurationError for an unknown name."""
    if name not in makers:
        remedy = "; a maker of yours must be named in grouper.makers, too" if is_user_maker(name) else ""
        raise ConfigurationError(f"grouping.maker is {name!r}; makers are {', '.join(makers)}{remedy}")
    return makers[name](context)


def _imported_maker(name: str) -> MakerFactory:
    maker = load_object(name, "grouper.makers names", "a maker is named package.module:Class")
    if not (isinstance(maker, type) and issubclass(maker, BatchMaker)):
        raise ConfigurationError(f"grouper.makers names {name!r}, which is not a subclass of BatchMaker")
    return maker


_LARGEST_FLOAT32 = float.fromhex("0x1.fffffep+127")


class PlugIns(NamedTuple):
    """Makers and estimators by the names that configurations may use."""

    makers: Mapping[str, MakerFactory] = MAKERS
    estimators: Mapping[str, Estimator] = ESTIMATORS


BUILT_IN = PlugIns()
"""The built-in makers and estimators."""


def load_plug_ins(grouper: GrouperConfig) -> PlugIns:
    """Import the makers and estimators that the settings of a process name, and add them to the built-in ones.

    Raises ConfigurationError for a malformed name, a module that cannot be imported, or an object that is not a maker
    or an estimator.
    """
    return PlugIns(load_makers(grouper.makers), {**ESTIMATORS, **load_estimators(grouper.estimators)})


def load_estimators(names: Iterable[str]) -> dict[str, Estimator]:
    """Import estimators by name: package.module:name or path/to/file.py:name. Each object is an Estimator, or a
    function that is its first stage. Their results are checked. Raises ConfigurationError as `load_plug_ins` does."""
    return {name: checked(name, _imported_estimator(name)) for name in names}


def checked(name: str, estimator: Estimator) -> Estimator:
    """Return an estimator that raises StateRefused unless each stage returns a finite float32 number for each value."""
    within, over = estimator.within_group, estimator.over_batch

    def within_group(outcomes: Outcomes) -> list[float]:
        return _checked(name, within(outcomes), len(outcomes.rewards))

    def over_batch(advantages: Sequence[float], weights: Sequence[float]) -> list[float]:
        assert over is not None, "only called for an estimator with a second stage"
        return _checked(name, over(advantages, weights), len(advantages))

    return replace(estimator, within_group=within_group, over_batch=None if over is None else over_batch)


def _checked(name: str, values: Sequence[float], count: int) -> list[float]:
    numbers = [float(value) for value in values]
    if len(numbers) != count:
        raise StateRefused(f"estimator {name} returned {len(numbers)} advantages for {count} values: fix the estimator")
    wrong = next((value for value in numbers if not abs(value) <= _LARGEST_FLOAT32), 0.0)
    if wrong or math.isnan(wrong):
        raise StateRefused(f"estimator {name} returned {wrong}, not a finite float32 number: fix the estimator")
    return numbers


def _imported_estimator(name: str) -> Estimator:
    named = load_object(name, "grouper.estimators names", "an estimator is named package.module:function")
    if isinstance(named, Estimator):
        return named
    if isinstance(named, type) or not callable(named):
        raise ConfigurationError(f"grouper.estimators names {name!r}, which is neither an Estimator nor a function")
    return Estimator(named)
