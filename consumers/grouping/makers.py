"""The batch makers a configuration may name: those that ship, and those of yours that the process was told of.

A configuration comes by the log, and whoever may write to the log must not be able to have code imported; so a name in
it is only looked up, never imported. What a process imports, its own setting grouper.makers says.
"""

from collections.abc import Callable, Iterable, Mapping

from consumers.grouping.batch_maker import BatchMaker, FifoBatchMaker, MakerContext
from consumers.grouping.reservoir import ReservoirBatchMaker
from consumers.importing import imported
from topics.errors import ConfigurationError

MakerFactory = Callable[[MakerContext], BatchMaker]
MAKERS: dict[str, MakerFactory] = {"fifo": FifoBatchMaker, "reservoir": ReservoirBatchMaker}


def is_of_users(name: str) -> bool:
    """Whether a name is that of a maker which does not ship: package.module:Class."""
    return ":" in name


def makers_of(names: Iterable[str]) -> dict[str, MakerFactory]:
    """MAKERS and the makers named, each package.module:Class. Imports them.

    Raises ConfigurationError for a name that is none, a module that cannot be imported, or what is no BatchMaker.
    """
    return {**MAKERS, **{name: _imported(name) for name in names}}


def batch_maker(name: str, context: MakerContext, makers: Mapping[str, MakerFactory] = MAKERS) -> BatchMaker:
    """A maker by name, among `makers`. Raises ConfigurationError for an unknown one."""
    if name not in makers:
        remedy = "; one of yours must be named in grouper.makers, too" if is_of_users(name) else ""
        raise ConfigurationError(f"grouping.maker is {name!r}; makers are {', '.join(makers)}{remedy}")
    return makers[name](context)


def _imported(name: str) -> MakerFactory:
    found = imported(name, "grouper.makers names", "a maker is named package.module:Class")
    if not (isinstance(found, type) and issubclass(found, BatchMaker)):
        raise ConfigurationError(f"grouper.makers names {name!r}, which is no subclass of BatchMaker")
    return found
