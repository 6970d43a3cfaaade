"""A policy that gives scripted replies, for tests of environments without a model or a server."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ScriptedReply:
    """A reply of a ScriptedPolicy."""

    text: str
    truncated: bool = False


class ScriptedPolicy:
    """The `generate` of an episode: it gives its replies in order and keeps the texts that it receives."""

    def __init__(self, *replies: str, truncated: bool = False) -> None:
        """`truncated` is whether the last reply is cut off by a token limit."""
        self._replies: Sequence[ScriptedReply] = [
            ScriptedReply(text, truncated=truncated and number == len(replies))
            for number, text in enumerate(replies, start=1)
        ]
        self.texts: list[str] = []
        """Texts received so far."""

    async def __call__(self, text: str) -> ScriptedReply:
        """Return the next reply. Raises IndexError if no replies are left."""
        if len(self.texts) == len(self._replies):
            raise IndexError(f"the script has {len(self._replies)} replies, but the environment asked for another")
        self.texts.append(text)
        return self._replies[len(self.texts) - 1]
