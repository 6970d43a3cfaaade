"""Rows `decode-equal`, `decode-mixed`, `decode-arrivals`: the inference engine against whole batches in sequence.

Answers of equal length suit whole batches. With mixed lengths, a batch waits for its longest answer; with arrivals, a
request waits until the previous batch has ended.
"""

import time
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.reproducibility import prepare_environment
from rollstream.consumers.models.config import DecoderConfig
from rollstream.consumers.weights.follower import WeightsFollower
from rollstream.pipeline.roles.infer import FollowedPolicy
from rollstream.producers.config import InferenceConfig
from rollstream.producers.inference.decoding import DecodeRequest
from rollstream.producers.inference.engine import Engine
from tests.bench.measure import Row, Settings, Stopwatch, Timing, interleaved

_ROWS = 64
_PROMPT = 16
_LONGEST = 112
_INTERVAL_S = 0.004
_BASELINE = "batches of what has arrived, each decoded to the end of its longest row in one compiled loop"


class _HeldWeights:
    """Stands in for a follower of weights, with one version that never changes."""

    version = 0
    manifest = None

    def __init__(self, arrays: dict[str, Any]) -> None:
        self._arrays = arrays

    def get_state(self, version: int) -> tuple[int, dict[str, Any]] | None:
        return None if version == 0 else (0, self._arrays)


def row(name: str, what: str, *, mixed: bool, interval_s: float = 0.0) -> Callable[[Settings], Row]:
    """Return a measurement of 256 requests, 64 of which are decoded in parallel."""

    def measure(settings: Settings) -> Row:
        # Use the threads of the learner's rows, which may follow in this process and cannot change JAX's threads then.
        prepare_environment(LearnerConfig(threads=1))
        import jax

        from rollstream.consumers.models import decoder
        from rollstream.consumers.models.slots import SlotDecoder
        from tests.bench.whole_batches import BatchDecoder, TimedRequest

        config = DecoderConfig()
        draw = np.random.default_rng(0)
        requests = [
            TimedRequest(
                draw.integers(2, config.vocab_size, _PROMPT).tolist(),
                seed,
                int(min(_LONGEST, 8 + draw.exponential(24))) if mixed else 32,
                seed * interval_s,
            )
            for seed in range(4 * _ROWS)
        ]
        tokens = sum(request.max_tokens for request in requests)
        arrays = {
            name: np.asarray(array)
            for name, array in jax.jit(decoder.init, static_argnums=1)(jax.random.key(0), config).items()
        }
        params = {name: jax.device_put(array) for name, array in arrays.items()}
        batches = BatchDecoder(config, (16, _ROWS), _PROMPT, _LONGEST if mixed else 32)
        slots = SlotDecoder(config, slots=_ROWS, max_model_len=_PROMPT + _LONGEST)
        policy = FollowedPolicy(cast(WeightsFollower, _HeldWeights(arrays)), slots, stop_ids=())
        policy.refresh()
        policy.warm_up()
        for count in (1, _ROWS):
            batches.decode(params, requests[:count])
        engine = Engine(policy, InferenceConfig(max_rows=_ROWS))
        engine.start()

        def ours() -> Timing:
            watch, futures = Stopwatch(), []
            began = time.perf_counter()
            for request in requests:
                late_s = request.arrives_s - (time.perf_counter() - began)
                if late_s > 0:
                    time.sleep(late_s)
                futures.append(
                    engine.submit(
                        DecodeRequest(
                            prompts=[request.prompt],
                            seeds=[request.seed],
                            max_tokens=request.max_tokens,
                            temperature=1.0,
                        )
                    )
                )
            if sum(len(future.result().rows[0].tokens) for future in futures) != tokens:
                raise RuntimeError("the engine sampled another number of tokens")
            return watch.timing(len(requests))

        def raw() -> Timing:
            watch = Stopwatch()
            if batches.serve(params, requests) != tokens:
                raise RuntimeError("the baseline sampled another number of tokens")
            return watch.timing(len(requests))

        try:
            timings, baseline = interleaved(settings.repetitions, ours, raw)
        finally:
            engine.close()
        median = sorted(timing.seconds for timing in timings)[len(timings) // 2]
        return Row(
            name=name,
            what=what,
            baseline=_BASELINE,
            size_bytes=0,
            ours=timings,
            raw=baseline,
            figures={"tokens/s": tokens / median},
        )

    return measure


equal = row("decode-equal", f"{4 * _ROWS} answers of 32 tokens by an engine of {_ROWS} slots", mixed=False)
mixed = row("decode-mixed", f"the same of 8 to {_LONGEST} tokens, most of them short", mixed=True)
arrivals = row(
    "decode-arrivals", f"mixed answers whose requests arrive one each {1000 * _INTERVAL_S:g} ms",
    mixed=True, interval_s=_INTERVAL_S,
)  # fmt: skip
