"""Samples the members of a group; one request for n samples serves their common prompt.

In later turns each member has its own context and its own request, with the tokens so far, as they were sampled, and
the tokens of the new text. A sample always has a policy version.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from rollstream.producers.environments.environment import Environment
from rollstream.producers.inference.client import Completion
from rollstream.producers.inference.decoding import row_seed
from rollstream.producers.inference.errors import ContextTooLong, InferenceRefused
from rollstream.producers.inference.requests import Filters, SampleRequest
from rollstream.topics.errors import RollstreamError


@dataclass(frozen=True, kw_only=True)
class GroupSampling:
    """Sampling parameters of a group."""

    group_size: int
    temperature: float
    seed: int
    assume_version: int = -1
    """Policy version assumed for a server that reports none; -1 refuses such a server."""
    filters: Filters = Filters()  # noqa: RUF009
    routed_experts: bool = False
    """Whether samples are to name the experts of each token."""


class SamplingClient(Protocol):
    """The part of a CompletionsClient that sampling needs."""

    async def complete(self, request: SampleRequest) -> list[Completion]:
        """Return the samples of a request."""

    async def tokenize(self, text: str, *, session: str) -> list[int]:
        """Return the token ids of a text."""


class GroupSampler:
    """Requests the samples of one group."""

    def __init__(self, client: SamplingClient, environment: Environment, sampling: GroupSampling) -> None:
        self.sampling = sampling
        self._client = client
        self._environment = environment
        # The session keeps a group on one server, which prefills the prompt once and caches its members' contexts.
        self._session = f"{sampling.seed:x}"
        self._shared_text: str | None = None
        self._shared: asyncio.Task[list[Completion]] | None = None

    def member(self, index: int) -> "MemberSampler":
        """Return the `generate` of one member's episode."""
        return MemberSampler(self, index)

    async def first(self, text: str, index: int) -> Completion:
        """Return a member's sample after its first text, which is normally the same for all members."""
        if self._shared is None:
            self._shared_text = text
            request = self._complete(text, n=self.sampling.group_size, seed=self.sampling.seed)
            self._shared = asyncio.ensure_future(request)
        if text != self._shared_text:
            return await self._alone(text, index, 0)
        # A member that is cancelled must not cancel the others' samples.
        return (await asyncio.shield(self._shared))[index]

    async def later(self, before: Completion, text: str, index: int, turn: int) -> Completion:
        """Return a member's next sample, after its sample `before` and the text that follows that sample."""
        added = await self._client.tokenize(text, session=self._session)
        return await self._alone([*before.prompt_tokens.tolist(), *before.tokens.tolist(), *added], index, turn)

    def close(self) -> None:
        """Cancel the common request if it has not been answered yet."""
        if self._shared:
            self._shared.cancel()

    async def _alone(self, prompt: str | Sequence[int], index: int, turn: int) -> Completion:
        # 63 bits, because servers take seeds as signed 64-bit integers.
        return (await self._complete(prompt, n=1, seed=row_seed(self.sampling.seed, index, turn) >> 1))[0]

    async def _complete(self, prompt: str | Sequence[int], *, n: int, seed: int) -> list[Completion]:
        request = SampleRequest(
            prompt=prompt,
            n=n,
            max_tokens=self._environment.max_tokens,
            temperature=self.sampling.temperature,
            seed=seed,
            stop=tuple(self._environment.stop),
            session=self._session,
            filters=self.sampling.filters,
            routed_experts=self.sampling.routed_experts,
        )
        completions = await self._client.complete(request)
        return [with_version(completion, self.sampling.assume_version) for completion in completions]


@dataclass(frozen=True)
class ContextFull:
    """The empty, truncated reply that is given if the model's context has no room for a reply. It is not recorded."""

    text: str = ""
    truncated: bool = True


class MemberSampler:
    """The `generate` of one member of a group.

    If the context is full, it returns one empty, truncated reply, so that the environment can score the episode so far.
    """

    def __init__(self, group: GroupSampler, index: int) -> None:
        self._group = group
        self._index = index
        self._turns = 0
        self._last: Completion | None = None
        self.full = False
        """Whether the context had no room for a reply."""
        self._mistake: Exception | None = None

    def check(self) -> None:
        """Raise the error of our own code that ended a call, even if the environment caught it."""
        if self._mistake is not None:
            raise self._mistake

    async def __call__(self, text: str) -> Completion | ContextFull:
        """Return the reply to a text. Raises ContextTooLong if the first text is too long, or if `full` is set."""
        if not isinstance(text, str):
            raise TypeError(f"generate takes a str, not a value of type {type(text).__name__}")
        try:
            return await self._reply(text)
        except RollstreamError:
            raise
        except Exception as error:
            self._mistake = error
            raise

    async def _reply(self, text: str) -> Completion | ContextFull:
        if self.full:
            raise ContextTooLong(
                "the environment continued after its context was full; end the episode at a truncated reply"
            )
        if self._last is None:
            self._last = await self._group.first(text, self._index)
        else:
            try:
                self._last = await self._group.later(self._last, text, self._index, self._turns)
            except ContextTooLong:
                self.full = True
                return ContextFull()
        self._turns += 1
        return self._last


def with_version(completion: Completion, assumed: int) -> Completion:
    """Return the completion, with the assumed version if it has none. Raises InferenceRefused if neither exists."""
    if completion.lowest_version >= 0 or not len(completion.tokens):
        return completion
    if assumed < 0:
        raise InferenceRefused(
            f"{completion.replica_id} does not say which policy version of the run sampled; for a model that never "
            "changes set worker.assume_version"
        )
    return replace(completion, versions=np.where(completion.versions < 0, assumed, completion.versions))
