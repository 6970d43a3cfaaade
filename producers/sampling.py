"""How the members of a group get their samples: the prompt they share is one request with n samples.

Later turns, where every context is its own, are requests of their own: the tokens so far, as they were sampled, and
those of the new text. A sample always has a policy version.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from producers.environment import Environment
from producers.inference.batching import row_seed
from producers.inference.client import Completion, CompletionsClient, InferenceRefused


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a group is sampled."""

    group_size: int
    temperature: float
    seed: int
    assume_version: int = -1
    """Policy version of a server that reports none; -1 refuses such a server."""


class GroupSampler:
    """Asks for the samples of one group."""

    def __init__(self, client: CompletionsClient, environment: Environment, sampling: Sampling) -> None:
        self.sampling = sampling
        self._client = client
        self._environment = environment
        self._shared_text: str | None = None
        self._shared: asyncio.Task[list[Completion]] | None = None

    def member(self, index: int) -> "MemberSampler":
        """The `generate` given to one member's episode."""
        return MemberSampler(self, index)

    async def first(self, text: str, index: int) -> Completion:
        """A member's sample after the text it begins with, normally the same text for all."""
        if self._shared is None:
            self._shared_text = text
            request = self._complete(text, n=self.sampling.group_size, seed=self.sampling.seed)
            self._shared = asyncio.ensure_future(request)
        if text != self._shared_text:
            return await self._alone(text, index, 0)
        # One member that gives up must not take the others' samples with it.
        return (await asyncio.shield(self._shared))[index]

    async def later(self, before: Completion, text: str, index: int, turn: int) -> Completion:
        """A member's sample after its sample `before` and a text said in reply."""
        said = await self._client.tokenize(text)
        return await self._alone([*before.prompt_tokens.tolist(), *before.tokens.tolist(), *said], index, turn)

    def close(self) -> None:
        """Give up what was asked and not answered."""
        if self._shared:
            self._shared.cancel()

    async def _alone(self, prompt: str | Sequence[int], index: int, turn: int) -> Completion:
        # 63 bits, since servers take seeds as signed 64-bit integers.
        return (await self._complete(prompt, n=1, seed=row_seed(self.sampling.seed, index, turn) >> 1))[0]

    async def _complete(self, prompt: str | Sequence[int], *, n: int, seed: int) -> list[Completion]:
        found = await self._client.complete(
            prompt,
            n=n,
            max_tokens=self._environment.max_tokens,
            temperature=self.sampling.temperature,
            seed=seed,
            stop=self._environment.stop,
        )
        return [with_version(completion, self.sampling.assume_version) for completion in found]


class MemberSampler:
    """`generate` for one member of a group."""

    def __init__(self, group: GroupSampler, index: int) -> None:
        self._group = group
        self._index = index
        self._turns = 0
        self._last: Completion | None = None

    async def __call__(self, text: str) -> Completion:
        if self._last is None:
            self._last = await self._group.first(text, self._index)
        else:
            self._last = await self._group.later(self._last, text, self._index, self._turns)
        self._turns += 1
        return self._last


def with_version(completion: Completion, assumed: int) -> Completion:
    """The completion, with the version assumed where the server named none. Raises InferenceRefused without either."""
    if completion.lowest_version >= 0:
        return completion
    if assumed < 0:
        raise InferenceRefused(
            f"{completion.replica_id} does not say which policy version sampled; for a model that never changes set "
            "worker.assume_version"
        )
    return replace(completion, lowest_version=assumed, highest_version=assumed)
