"""A base for objects that are closed at the end of a with block."""

from typing import Self


class Closing:
    """Calls `close`, which subclasses define, at the end of a with block."""

    def close(self) -> object:
        """Release the resources held."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
