"""The role `infer`: an inference server whose decoder follows the weights topic.

It listens once the first policy version is loaded and everything is compiled, so that a ready server answers at once.
It compiles while the learner still makes that version.
"""

import argparse
import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rollstream.consumers.learner.pretrained import model_of, tokenizer_of
from rollstream.consumers.models.config import DecoderConfig, decoder_config, manifest_model
from rollstream.consumers.models.tokenizer import Tokenizer
from rollstream.consumers.weights.follower import WeightsFollower
from rollstream.pipeline.command_line.command_parser import set_handler
from rollstream.pipeline.command_line.process_number import add_number
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.process.role_process import announce_progress, announce_ready, run_until_stopped
from rollstream.pipeline.run.broker_wait import wait_for_broker
from rollstream.pipeline.run.jax_runtime import prepare_jax
from rollstream.producers.inference.chat.selection import chat_template
from rollstream.producers.inference.chat.template import ChatTemplate
from rollstream.producers.inference.decoding import DecodeRow
from rollstream.producers.inference.server import InferenceServer
from rollstream.producers.metrics_publisher import MetricsPublisher
from rollstream.topics.errors import ConfigurationError, DeadlineExceeded, StateRefused
from rollstream.topics.logs import event

if TYPE_CHECKING:
    from rollstream.consumers.models.decoder import Params
    from rollstream.consumers.models.slots import RowTokens, SlotDecoder

logger = logging.getLogger(__name__)
_PROGRESS_S = 10.0
_MIB = 1024 * 1024


class FollowedPolicy:
    """The engine's generator, which samples with the newest complete policy version of a run."""

    def __init__(self, follower: WeightsFollower, decoder: "SlotDecoder", stop_ids: Sequence[int]) -> None:
        self._follower = follower
        self._decoder = decoder
        self._stop_ids = stop_ids
        self._version = -1
        self._params: Params = {}
        self._model = ""
        """Model of the version in use, as its manifest describes it."""

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a prompt and its answer together."""
        return self._decoder.max_model_len

    @property
    def vocab_size(self) -> int:
        """Number of token ids of the model, which may be more than the tokenizer has."""
        return self._decoder.config.vocab_size

    @property
    def model(self) -> DecoderConfig:
        """The model whose versions can be served, with its adapters."""
        return self._decoder.published

    @property
    def cache_bytes(self) -> int:
        """Size of the cache of keys and values."""
        return self._decoder.cache_bytes

    @property
    def free(self) -> int:
        """Number of slots without a row."""
        return self._decoder.free

    @property
    def behind(self) -> bool:
        """Whether a version newer than the one in use has arrived."""
        return self._follower.version > self._version

    def refresh(self) -> int:
        """Swap to the newest version if there is a newer one; return the version in use.

        Raises StateRefused if the newest version is of another model.
        """
        newer = self._follower.get_state(self._version)
        if newer is not None:
            self._check_model()
            self._version, arrays = newer
            self._params = self._decoder.place(arrays)
        return self._version

    def _check_model(self) -> None:
        """Refuse another model, or other adapters: the decoder is compiled for one model, and would drop adapters."""
        manifest = self._follower.manifest
        if manifest is None or manifest.model == self._model:
            return
        if decoder_config(manifest.model) != self._decoder.published:
            raise StateRefused(
                f"policy version {manifest.version} is of another model, or has other adapters, than the one that this "
                f"server started with; start the server again to serve it: {manifest.model}"
            )
        self._model = manifest.model

    def start(self, rows: Sequence[DecodeRow]) -> Sequence[int]:
        """Start rows with the version in use; return the slot of each."""
        from rollstream.consumers.models.slots import Row

        return self._decoder.start(
            self._params,
            [
                Row(
                    prompt=row.prompt,
                    seed=row.seed,
                    max_tokens=row.request.max_tokens,
                    temperature=row.request.temperature,
                    top_p=row.request.top_p,
                    top_k=row.request.top_k,
                    min_p=row.request.min_p,
                    stop_ids=(*self._stop_ids, *row.request.stop_token_ids),
                    mask=row.request.constraint() if row.request.constraint else None,
                )
                for row in rows
            ],
        )

    def decode(self) -> "Sequence[RowTokens]":
        """Decode some tokens of every row with the version in use."""
        return self._decoder.decode(self._params)

    def routed_experts(self, slot: int, length: int) -> NDArray[Any] | None:
        """Return the experts of the first positions of the row in a slot, or that ended there last; None if the model
        has none."""
        return self._decoder.routed_experts(slot, length)

    def end(self, slot: int) -> None:
        """Remove the row in a slot before its end."""
        self._decoder.end(slot)

    def reset(self) -> None:
        """Remove all rows."""
        self._decoder.reset()

    def warm_up(self) -> None:
        """Compile every shape, which needs no version, and report each one as progress, so that the supervisor goes on
        waiting."""
        from rollstream.consumers.models.decoder import shapes

        zeros = {name: np.zeros(shape, np.float32) for name, shape in shapes(self.model).items()}
        self._decoder.warm_up(self._decoder.place(zeros), announce_progress)


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream role infer`."""
    set_handler(parser, run, role=True)
    add_number(parser, "server")


def run(config: RunConfig, args: argparse.Namespace) -> int:
    """Serve until stopped."""
    config = replace(config, inference=config.inference.replica(args.ordinal))
    tokenizer = tokenizer_of(config.learner)
    template = chat_template(
        config.inference.chat_template, tokenizer, config.learner.pretrained, config.inference.chat_template_kwargs
    )
    wait_for_broker(config)
    with WeightsFollower(config.kafka, config.run, config=config.learner.weights) as follower:
        prepare_jax(config)
        # Until the server listens there is nothing to drain, so a signal ends it at once.
        policy = prepare(config, tokenizer, follower)
        run_until_stopped(lambda stop: _serve(config, policy, tokenizer, template, stop))
    return 0


async def _serve(
    config: RunConfig, policy: FollowedPolicy, tokenizer: Tokenizer, template: ChatTemplate, stop: asyncio.Event
) -> None:
    inference = config.inference
    async with InferenceServer(policy, tokenizer, inference, template, policy.vocab_size) as server:
        publisher = MetricsPublisher(
            config.kafka,
            config.run,
            inference.replica_id,
            "infer",
            server.metrics,
            interval_s=inference.metrics_interval_s,
        )
        async with publisher:
            announce_ready()
            await server.serve_until(stop)


def wait_for_version(follower: WeightsFollower, timeout_s: float) -> None:
    """Wait for the first version. Raises DeadlineExceeded after `timeout_s`, but never under a supervisor."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            follower.wait_for(0, min(timeout_s, _PROGRESS_S))
            return
        except DeadlineExceeded:
            supervised = announce_progress("waiting for a policy version that can be fetched")
            if not supervised and time.monotonic() > deadline:
                raise


def prepare(config: RunConfig, tokenizer: Tokenizer, follower: WeightsFollower) -> FollowedPolicy:
    """Compile for the model of the first version, and wait for that version.

    A learner of the settings' model makes it meanwhile. If a version exists, or is of another model, its model counts.
    """
    policy = None
    if follower.version < 0:
        policy = _compiled(config, model_of(config.learner), tokenizer, follower)
    wait_for_version(follower, config.supervisor.ready_timeout_s)
    manifest = follower.manifest
    assert manifest is not None, "a version was waited for"
    model = decoder_config(manifest.model)
    if policy is None or policy.model != model:
        policy = _compiled(config, model, tokenizer, follower)
    policy.refresh()
    return policy


def _compiled(
    config: RunConfig, model: DecoderConfig, tokenizer: Tokenizer, follower: WeightsFollower
) -> FollowedPolicy:
    """Import JAX and compile for a model. Raises ConfigurationError if its cache is too large."""
    from rollstream.consumers.models.slots import SlotDecoder, cache_bytes

    began = time.monotonic()
    inference = config.inference
    cache_mib = cache_bytes(model, inference.max_rows, inference.max_model_len, inference.dtype) / _MIB
    if cache_mib > inference.max_cache_mib:
        raise ConfigurationError(
            f"{inference.max_rows} sequences of {inference.max_model_len} tokens need a cache of {cache_mib:,.0f} MiB, "
            f"more than inference.max_cache_mib, {inference.max_cache_mib}: lower inference.max_rows or "
            "inference.max_model_len, or raise inference.max_cache_mib"
        )
    decoder = SlotDecoder(
        model,
        slots=inference.max_rows,
        max_model_len=inference.max_model_len,
        dtype=inference.dtype,
        devices=inference.devices,
        tensor_parallel=inference.tensor_parallel,
        steps=inference.decode_steps,
    )
    policy = FollowedPolicy(follower, decoder, tokenizer.eos_ids)
    policy.warm_up()
    event(
        logger,
        "decoder_compiled",
        seconds=round(time.monotonic() - began, 2),
        cache_mib=round(cache_mib, 1),
        model=manifest_model(model),
    )
    return policy
