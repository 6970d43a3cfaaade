"""Batch makers that a configuration may name: those that ship, and those of users that the process imports.

A configuration comes from the log, and nobody who may write to the log must be able to import code into a process. So
its names are only looked up. A process imports the makers that its own setting grouper.makers names.
"""

from collections.abc import Callable, Iterable, Mapping

from rollstream.consumers.grouping.makers.batch_maker import BatchMaker, FifoBatchMaker, MakerContext
from rollstream.consumers.grouping.makers.reservoir import ReservoirBatchMaker
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.user_code import load_object

MakerFactory = Callable[[MakerContext], BatchMaker]
MAKERS: dict[str, MakerFactory] = {"fifo": FifoBatchMaker, "reservoir": ReservoirBatchMaker}


def is_user_maker(name: str) -> bool:
    """Whether a name is that of a user's maker: package.module:Class or path/to/file.py:Class."""
    return ":" in name


def load_makers(names: Iterable[str]) -> dict[str, MakerFactory]:
    """Import the makers named, each package.module:Class or path/to/file.py:Class. Imports them.

    Return MAKERS and the imported makers. Raises ConfigurationError for a name of another form, a module that cannot be
    imported, or an object that is no BatchMaker.
    """
    return {**MAKERS, **{name: _imported(name) for name in names}}


def batch_maker(name: str, context: MakerContext, makers: Mapping[str, MakerFactory] = MAKERS) -> BatchMaker:
    """Return a new maker by its name among `makers`. Raises ConfigurationError for an unknown name."""
    if name not in makers:
        remedy = "; one of yours must be named in grouper.makers, too" if is_user_maker(name) else ""
        raise ConfigurationError(f"grouping.maker is {name!r}; makers are {', '.join(makers)}{remedy}")
    return makers[name](context)


def _imported(name: str) -> MakerFactory:
    maker = load_object(name, "grouper.makers names", "a maker is named package.module:Class")
    if not (isinstance(maker, type) and issubclass(maker, BatchMaker)):
        raise ConfigurationError(f"grouper.makers names {name!r}, which is no subclass of BatchMaker")
    return maker
