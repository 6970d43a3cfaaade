"""`python -m tests.bench.compression`: compressed size and processor time of rollouts and batches, by codec and level.

It needs no broker: it compresses and decompresses the bytes that a client would compress together (40 rollouts, or one
batch). Natural tokens come from passages of the project's pages: each word is replaced by its rank in frequency, so
tokens repeat as words do in a natural language, and the turns hold the words themselves. Uniform tokens are drawn
independently, so they have no pattern.
"""

import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core import task_state
from rollstream.consumers.grouping.core.effects import InputRecord
from rollstream.consumers.grouping.core.fold import Fold
from rollstream.pipeline.command_line.text_tables import table
from rollstream.topics.records import Rollout
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from tests.bench import material
from tests.support.paths import ROOT

_SEED = 0
_ROLLOUTS, _GROUP, _TOKENS = 512, 8, 2560
_TOGETHER = 40
"""Rollouts that a producer sends together."""
_REPETITIONS = 15
_CODECS = (("lz4", None), ("zstd", -1), ("zstd", 1), ("zstd", 2), ("zstd", 3), ("zstd", 6))


def uniform() -> Iterator[Rollout]:
    """Yield rollouts of uniform tokens."""
    rng = np.random.default_rng(_SEED)
    for group in range(_ROLLOUTS // _GROUP):
        for member in range(_GROUP):
            yield material.rollout(rng, _TOKENS, f"example-{group}", member, _GROUP)


def natural() -> Iterator[Rollout]:
    """Yield rollouts of words of the pages, each from a random place; half of the tokens are nearly certain."""
    rng = np.random.default_rng(_SEED)
    words = re.findall(
        r"\s*\w+|\s*[^\w\s]", "".join(p.read_text("utf-8") for p in sorted((ROOT / "docs").glob("*.md")))
    )
    ranks = {word: rank for rank, (word, _) in enumerate(Counter(words).most_common())}
    ids = np.array([ranks[word] for word in words], "<i4")
    for rollout in uniform():
        start, length = int(rng.integers(len(words) - _TOKENS)), len(rollout.tokens)
        surprise = rng.exponential(np.where(rng.random(length) < 0.5, 0.01, 1.5))
        question, answer = rollout.turns
        yield replace(
            rollout,
            tokens=ids[start : start + length],
            logprobs=np.where(rollout.loss_mask, -surprise, 0.0).astype("<f4"),
            turns=(
                replace(question, text="".join(words[start : start + question.stop])),
                replace(answer, text="".join(words[start + answer.start : start + answer.stop])),
            ),
        )


def batches(values: Sequence[bytes], rollouts: Sequence[Rollout]) -> list[bytes]:
    """Return the batches of these rollouts, encoded."""
    first = task_state.initial_record(0, 1, "bench", GroupingConfig(capacity_bytes=10**12))
    fold = Fold(task_state.restored_state([replace(first, policy_version=0, watermark_policy_version=0)]))
    for offset, (rollout, value) in enumerate(zip(rollouts, values, strict=True)):
        fold.apply(InputRecord(offset, offset, encode_key(rollout.environment, rollout.example_id), value))
    return [encode(batch) for batch in fold.prepare_commit().batches]


def least_us(work: Callable[[], object], rollouts: int) -> float:
    """Return the shortest processor time of several repetitions, in microseconds per rollout."""
    seconds = []
    for _ in range(_REPETITIONS):
        began = time.process_time()
        work()
        seconds.append(time.process_time() - began)
    return 1e6 * min(seconds) / rollouts


def measured(kind: str, records: Sequence[bytes], rollouts: int) -> Iterator[list[object]]:
    """Yield a line of the table for each codec and level."""
    size_bytes = sum(map(len, records))
    for name, level in _CODECS:
        codec = pa.Codec(name, compression_level=level)
        packed = [codec.compress(record, asbytes=True) for record in records]
        pairs = list(zip(packed, map(len, records), strict=True))
        packing_us = least_us(lambda: [codec.compress(record, asbytes=True) for record in records], rollouts)  # noqa: B023
        opening_us = least_us(lambda: [codec.decompress(p, n, asbytes=True) for p, n in pairs], rollouts)  # noqa: B023
        packed_bytes = sum(map(len, packed))
        label = name if level is None else f"{name} {level}"
        share = f"{packed_bytes / size_bytes:.2f}"
        yield [kind, label, round(packed_bytes / rollouts), share, round(packing_us), round(opening_us)]


def main() -> int:
    """Print the table."""
    lines: list[list[object]] = []
    for kind, make in (("natural", natural), ("uniform", uniform)):
        rollouts = list(make())
        values = [encode(rollout) for rollout in rollouts]
        together = [b"".join(values[i : i + _TOGETHER]) for i in range(0, len(values), _TOGETHER)]
        lines += measured(f"{kind} rollouts", together, len(values))
        lines += measured(f"{kind} batches", batches(values, rollouts), len(values))
    print(table(["records", "codec", "bytes a rollout", "share", "compressing, us", "decompressing, us"], lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
