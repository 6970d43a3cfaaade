"""Counter-based random choices: a function of a seed and counters, never of what was drawn before (numpy only).

Philox, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import numpy as np
from numpy.typing import NDArray

_WORD = 2**64


def generator_at(seed: int, *counters: int) -> np.random.Generator:
    """A generator of its own for a seed and up to three counters, which are taken modulo 2**64.

    The same numbers give the same draws on every machine and in every process.
    """
    if len(counters) > 3:
        raise ValueError(f"{len(counters)} counters; Philox has room for three beside its own")
    words = [0, *(counter % _WORD for counter in counters)]
    words += [0] * (4 - len(words))
    key = np.array([seed % _WORD, (seed // _WORD) % _WORD], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=np.array(words, np.uint64)))


def weighted_without_replacement(
    generator: np.random.Generator, log_weights: NDArray[np.float64], count: int
) -> NDArray[np.int64]:
    """`count` different indices in the order they are drawn: each draw takes index i with probability in proportion to
    exp(log_weights[i]) among those that are left.

    Perturbed by Gumbel noise the largest are such draws (Efraimidis and Spirakis 2006 in log space; Vieira 2014), so
    that no weight over- or underflows. Raises ValueError for more than there are.
    """
    if not 0 <= count <= len(log_weights):
        raise ValueError(f"{count} of {len(log_weights)} without replacement")
    # By hand: numpy promises the stream of its uniform numbers, not that of its distributions (NEP 19).
    waits = -np.log1p(-generator.random(len(log_weights)))
    keys = log_weights - np.log(np.maximum(waits, np.finfo(np.float64).tiny))
    # Sorting all of them would cost most of a draw.
    largest = np.sort(np.argpartition(-keys, count)[:count]) if count < len(keys) else np.arange(count)
    return largest[np.argsort(-keys[largest], kind="stable")].astype(np.int64)
