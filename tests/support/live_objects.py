"""Objects in memory, counted as the garbage collector sees them: a test of what is let go."""

import gc
from typing import TypeVar

T = TypeVar("T")


def live(*kinds: type[T]) -> list[T]:
    """Return every object of these classes that something still holds."""
    gc.collect()
    # By the type alone: isinstance also asks an object for its __class__, and some of torch's warn then.
    return [each for each in gc.get_objects() if issubclass(type(each), kinds)]
