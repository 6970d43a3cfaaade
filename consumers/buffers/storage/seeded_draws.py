"""Counter-based random choices: functions of a seed and counters, independent of earlier draws. Uses only numpy.

The generator is Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import numpy as np
from numpy.typing import NDArray

_WORD = 2**64


def generator_at(seed: int, *counters: int) -> np.random.Generator:
    """Create a generator for a seed and up to three counters, which are taken modulo 2**64.

    The same arguments give the same draws on every machine and in every process.
    """
    if len(counters) > 3:
        raise ValueError(f"{len(counters)} counters; give at most three, because Philox uses the fourth itself")
    words = [0, *(counter % _WORD for counter in counters)]
    words += [0] * (4 - len(words))
    key = np.array([seed % _WORD, (seed // _WORD) % _WORD], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=np.array(words, np.uint64)))


def weighted_without_replacement(
    generator: np.random.Generator, log_weights: NDArray[np.float64], count: int
) -> NDArray[np.int64]:
    """Draw `count` different indices, in order: each draw takes one of the remaining indices i with probability
    proportional to exp(log_weights[i]).

    The indices of the largest log-weights after adding Gumbel noise are such draws (Efraimidis and Spirakis 2006 in log
    space; Vieira 2014), so no weight overflows or underflows. Raises ValueError if there are fewer indices.
    """
    if not 0 <= count <= len(log_weights):
        raise ValueError(f"cannot draw {count} of {len(log_weights)} without replacement")
    # Not generator.gumbel, because numpy guarantees only the stream of uniform numbers (NEP 19).
    waits = -np.log1p(-generator.random(len(log_weights)))
    keys = log_weights - np.log(np.maximum(waits, np.finfo(np.float64).tiny))
    # Only the largest keys are sorted, because sorting all of them would take most of the time of a draw.
    largest = np.sort(np.argpartition(-keys, count)[:count]) if count < len(keys) else np.arange(count)
    return largest[np.argsort(-keys[largest], kind="stable")].astype(np.int64)
