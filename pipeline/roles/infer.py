"""The role `infer`: an inference server whose sampler follows the weights topic.

It listens once a first policy version is in place and everything is compiled, so whoever finds it ready gets answers.
"""

import argparse
import asyncio
import json
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from consumers.learner.pretrained import tokenizer_of
from consumers.models.config import DecoderConfig
from consumers.models.tokenizer import Tokenizer
from consumers.weights.follower import WeightsFollower
from pipeline.config import RunConfig
from pipeline.process import announce_progress, announce_ready, run_until_stopped
from pipeline.roles.jax_runtime import prepare_jax
from producers.environment import SPLITS
from producers.inference.batching import Generated
from producers.inference.server import InferenceServer
from producers.tasks import Task, create_task
from topics import clients
from topics.errors import DeadlineExceeded
from topics.logs import event

if TYPE_CHECKING:
    from consumers.models.decoder import Params
    from consumers.models.sampler import Sampler

logger = logging.getLogger(__name__)
_SAY_S = 10.0
_ROW_BUCKETS = (64,)
"""Row counts compiled besides inference.max_rows: small batches need not pay for the largest."""


class FollowedPolicy:
    """The newest whole policy version of a run, as the engine's generator."""

    def __init__(self, follower: WeightsFollower, sampler: "Sampler", stop_ids: Sequence[int]) -> None:
        self._follower = follower
        self._sampler = sampler
        self._stop_ids = stop_ids
        self._version = -1
        self._params: Params | None = None

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt it takes."""
        return self._sampler.max_prompt_length

    @property
    def max_new_tokens(self) -> int:
        """Most tokens it samples after a prompt."""
        return self._sampler.max_new_tokens

    def refresh(self) -> int:
        """Swap to the newest version if there is a newer one; returns the version in place."""
        newer = self._follower.get_state(self._version)
        if newer is not None:
            self._version, arrays = newer
            self._params = self._sampler.place(arrays)
        return self._version

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        temperatures: Sequence[float],
        max_tokens: Sequence[int],
    ) -> Sequence[Generated]:
        """Sample after each prompt, all under the version in place."""
        assert self._params is not None, "the engine asks only once a version is in place"
        completions = self._sampler.sample(self._params, prompts, seeds, temperatures, max_tokens, self._stop_ids)
        return [Generated(c.tokens.tolist(), c.logprobs.tolist(), c.finish_reason) for c in completions]

    def warm_up(self) -> None:
        """Compile every shape for the version in place."""
        assert self._params is not None, "refresh first"
        self._sampler.warm_up(self._params)


def run(config: RunConfig, args: argparse.Namespace) -> int:
    """Serve until told to stop."""
    task = create_task(config.task, config.tasks)
    tokenizer = tokenizer_of(config.learner)
    clients.check_broker(config.kafka)
    with WeightsFollower(config.kafka, config.run, config=config.learner.weights) as follower:
        prepare_jax(config)
        # Until it listens there is nothing to drain, and a signal ends it at once.
        policy = _prepare(config, task, tokenizer, follower)
        run_until_stopped(lambda stop: _serve(config, policy, tokenizer, stop))
    return 0


async def _serve(config: RunConfig, policy: FollowedPolicy, tokenizer: Tokenizer, stop: asyncio.Event) -> None:
    async with InferenceServer(policy, tokenizer, config.inference) as server:
        announce_ready()
        await server.serve_until(stop)


def wait_for_version(follower: WeightsFollower, timeout_s: float) -> None:
    """Wait for a first version: for so long, or, under a supervisor, for as long as that waits for the learner."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            follower.wait_for(0, min(timeout_s, _SAY_S))
            return
        except DeadlineExceeded:
            if not announce_progress("waiting for policy version 0") and time.monotonic() > deadline:
                raise


def _prepare(config: RunConfig, task: Task, tokenizer: Tokenizer, follower: WeightsFollower) -> FollowedPolicy:
    """Wait for a first version and compile for its shapes; importing JAX overlaps with the wait."""
    from consumers.models.sampler import Sampler

    wait_for_version(follower, config.supervisor.ready_timeout_s)
    manifest = follower.manifest
    assert manifest is not None, "a version was waited for"
    began = time.monotonic()
    sampler = Sampler(
        DecoderConfig(**json.loads(manifest.model)),
        row_buckets=(*(rows for rows in _ROW_BUCKETS if rows < config.inference.max_rows), config.inference.max_rows),
        max_prompt_length=max(len(tokenizer.encode(p.text)) for split in SPLITS for p in task.prompts(split)),
        max_new_tokens=task.max_tokens,
    )
    policy = FollowedPolicy(follower, sampler, tokenizer.eos_ids)
    policy.refresh()
    policy.warm_up()
    event(logger, "sampler_compiled", seconds=round(time.monotonic() - began, 2), model=manifest.model)
    return policy
