"""Row `codec`: encodes and decodes a whole rollout with rollstream.topics.wire.codec, against its arrays alone."""

import numpy as np

from rollstream.topics.records import Rollout
from rollstream.topics.wire.codec import decode_as, encode
from tests.bench import codec_baseline
from tests.bench.material import rollout
from tests.bench.measure import Row, Settings, Stopwatch, Timing, interleaved


def measure(settings: Settings) -> Row:
    """Encode and decode one rollout repeatedly, on one core."""
    subject = rollout(np.random.default_rng(0), settings.tokens, "example", 0, settings.group_size)

    def ours() -> Timing:
        watch = Stopwatch()
        for _ in range(settings.rollouts):
            decode_as(Rollout, encode(subject))
        return watch.timing(settings.rollouts)

    rates, raw = interleaved(settings.repetitions, ours, lambda: codec_baseline.measure(subject, settings.rollouts))
    return Row(
        name="codec",
        what="encode and decode a rollout, all fields, to a dataclass with arrays",
        baseline="its three arrays alone: numpy tobytes and frombuffer in fastavro bytes fields",
        ours=rates,
        raw=raw,
        size_bytes=len(encode(subject)),
        tokens=settings.tokens,
    )
