"""Things that are closed at the end of a with block."""

from typing import Self


class Closing:
    """Closes itself at the end of a with block; who inherits from it has a `close`."""

    def close(self) -> object:
        """Give back what is held."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
