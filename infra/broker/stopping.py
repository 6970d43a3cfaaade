"""A base for brokers and clusters that are stopped at the end of a with block."""

from typing import Self


class Stopping:
    """Calls `stop` at the end of a with block; subclasses define it."""

    def stop(self) -> None:
        """Stop what was started."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
