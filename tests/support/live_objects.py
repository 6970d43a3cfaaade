"""Objects in memory, as the garbage collector sees them, to test what is released."""

import gc
from typing import TypeVar

T = TypeVar("T")


def live(*kinds: type[T]) -> list[T]:
    """Return every object of these classes that something still holds."""
    gc.collect()
    # Check the type alone, because isinstance also asks an object for its __class__, and some of torch's warn then.
    return [each for each in gc.get_objects() if issubclass(type(each), kinds)]
