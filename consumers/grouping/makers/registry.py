"""Batch makers that a configuration may name: the built-in makers, and users' makers that the process imports.

A configuration is read from the log, and permission to write to the log must not suffice to import code into a process.
Therefore its names are only looked up. A process only imports the makers that its setting grouper.makers names.
"""

from collections.abc import Callable, Iterable, Mapping

from rollstream.consumers.grouping.makers.batch_maker import BatchMaker, FifoBatchMaker, MakerContext
from rollstream.consumers.grouping.makers.reservoir import ReservoirBatchMaker
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.user_code import load_object

MakerFactory = Callable[[MakerContext], BatchMaker]
MAKERS: dict[str, MakerFactory] = {"fifo": FifoBatchMaker, "reservoir": ReservoirBatchMaker}


def is_user_maker(name: str) -> bool:
    """Whether a name refers to a user's maker: package.module:Class or path/to/file.py:Class."""
    return ":" in name


def load_makers(names: Iterable[str]) -> dict[str, MakerFactory]:
    """Import makers by name, package.module:Class or path/to/file.py:Class, and add them to MAKERS.

    Raises ConfigurationError for a malformed name, a module that cannot be imported, or an object that is not a
    BatchMaker.
    """
    return {**MAKERS, **{name: _imported(name) for name in names}}


def batch_maker(name: str, context: MakerContext, makers: Mapping[str, MakerFactory] = MAKERS) -> BatchMaker:
    """Return a new maker by its name in `makers`. Raises ConfigurationError for an unknown name."""
    if name not in makers:
        remedy = "; a maker of yours must be named in grouper.makers, too" if is_user_maker(name) else ""
        raise ConfigurationError(f"grouping.maker is {name!r}; makers are {', '.join(makers)}{remedy}")
    return makers[name](context)


def _imported(name: str) -> MakerFactory:
    maker = load_object(name, "grouper.makers names", "a maker is named package.module:Class")
    if not (isinstance(maker, type) and issubclass(maker, BatchMaker)):
        raise ConfigurationError(f"grouper.makers names {name!r}, which is not a subclass of BatchMaker")
    return maker
