"""Metadata of a committed offset of `rollouts`: the journal records that hold the state at that position.

Offset and metadata are committed together, so the position and the state of a grouping task always agree.
"""

import json
from typing import NamedTuple

from rollstream.topics.errors import StateRefused


class CommitMetadata(NamedTuple):
    """Offsets in `journal` that a committed offset of `rollouts` points to."""

    journal: int
    """Offset of the task's newest journal record."""
    snapshot: int
    """Offset of its newest snapshot."""
    oldest: int
    """Offset of the oldest journal record that a restore needs: at most `snapshot`, and lower if earlier records name
    groups that are still remembered (grouping.horizon_s)."""

    def encode(self) -> str:
        return json.dumps({"v": 1, **self._asdict()})

    @classmethod
    def decode(cls, text: str | None, where: str) -> "CommitMetadata":
        """Decode the metadata committed for `where`. Raises StateRefused for anything this version did not write."""
        try:
            values = json.loads(text or "")
            if values.pop("v") != 1:
                raise ValueError("another version")
            return cls(**values)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StateRefused(
                f"the offset committed for {where} carries {text!r} instead of rollstream's metadata ({error}); "
                f"another program committed it: stop that program, and commit again with "
                "`rollstream role group recover`"
            ) from error
