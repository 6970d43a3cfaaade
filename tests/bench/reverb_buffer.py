"""Baseline of `buffer-reverb`: rollouts added to a full table of Reverb's, and drawn from it, in a Python that has it.

Server and client are one process, in which Reverb does not use gRPC. An item is one rollout: tokens, log-probabilities,
mask and advantage.
"""

import json
import sys
from typing import Any

import numpy as np

from tests.bench.measure import Settings, Stopwatch, Timing

CAPACITY = 4096
SAMPLE = 256
GROUPS_A_SAMPLE = 32
"""As many rollouts come as are drawn, where groups are of eight."""
_LENGTH = Settings.tokens


def measure(rollouts: int) -> Timing:
    """Add rollouts to a full table, and draw a sample after every `SAMPLE` of them."""
    import reverb

    table = reverb.Table(
        name="rollouts",
        sampler=reverb.selectors.Uniform(),
        remover=reverb.selectors.Fifo(),
        max_size=CAPACITY,
        rate_limiter=reverb.rate_limiters.MinSize(1),
    )
    server = reverb.Server([table], port=None)
    client = reverb.Client(f"127.0.0.1:{server.port}")
    generator = np.random.default_rng(0)
    logprobs, mask = -generator.exponential(1.0, _LENGTH).astype("<f4"), np.arange(_LENGTH) >= _LENGTH // 8
    tokens = [generator.integers(0, 32_000, _LENGTH).astype("<i4") for _ in range(SAMPLE)]
    with client.trajectory_writer(num_keep_alive_refs=1) as writer:

        def add(count: int) -> None:
            for number in range(count):
                writer.append(
                    {
                        "tokens": tokens[number % SAMPLE],
                        "logprobs": logprobs,
                        "mask": mask,
                        "advantage": np.float32(number),
                    }
                )
                writer.create_item("rollouts", 1.0, {name: column[-1:] for name, column in writer.history.items()})
                if number % 64 == 63:
                    writer.flush()  # Reverb warns of more waiting items
            writer.flush()

        add(CAPACITY)
        watch, samples = Stopwatch(), max(1, rollouts // SAMPLE)
        for _ in range(samples):
            add(SAMPLE)
            drawn = sum(1 for _ in client.sample("rollouts", num_samples=SAMPLE, emit_timesteps=False))
            if drawn != SAMPLE:
                raise RuntimeError(f"{drawn} samples instead of {SAMPLE}")
        return watch.timing(samples * SAMPLE)


def main(arguments: dict[str, Any]) -> None:
    """Print the timing, as `in_child` expects it."""
    print("ready", flush=True)
    print(json.dumps(measure(arguments["rollouts"])._asdict()))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
