"""Figures of an evaluation: mean reward, avg@n and pass@k over its prompts, with intervals. Pure.

avg@n is the mean share of a prompt's n answers that succeed. pass@k is the probability that at least one of k answers
succeeds; it is estimated from n >= k answers without bias, 1 - C(n - c, k) / C(n, k) with c successes
(arXiv:2107.03374). Intervals hold 95 % of the means of prompts drawn anew with replacement; the draws are seeded, so
equal answers have equal intervals.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rollstream.topics.records import Rollout

_DRAWS, _SEED = 1000, 0
_TAILS = (0.025, 0.975)
_MOST_DIGITS = 9


class Answer(NamedTuple):
    """One answer to a prompt."""

    example: str
    reward: float
    success: bool


class Figure(NamedTuple):
    """A mean and its interval."""

    mean: float
    low: float
    high: float


def prompts_named(rollout: Rollout) -> int | None:
    """Return the number of prompts in the whole evaluation, as its rollout names it; None without a valid number."""
    text = rollout.extra.get("prompts", "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS else None


def pass_at(k: int, answers: int, successes: int) -> float:
    """Return the estimate of pass@k from one prompt's answers, of which there are at least k."""
    return 1.0 - math.comb(answers - successes, k) / math.comb(answers, k)


def means(answers: Iterable[Answer]) -> dict[str, float]:
    """Return the means of `reward`, `success` (avg@n) and each `pass@k`, whatever the order of the answers.

    k is each power of 2 up to n, and n, the smallest number of answers that a prompt has; pass@1 is `success`.
    """
    names, rows = _by_prompt(answers)
    return dict(zip(names, _mean(rows), strict=True))


def figures(environments: Sequence[Iterable[Answer]]) -> dict[str, Figure]:
    """Return the figures of one environment, or of a suite: means over its environments, each of the same weight."""
    drawing = np.random.default_rng(_SEED)
    parts: list[dict[str, tuple[float, npt.NDArray[np.float64]]]] = []
    for answers in environments:
        names, rows = _by_prompt(answers)
        # Drawing prompts is drawing how often each of their distinct rows comes, and there are few distinct rows.
        distinct, counts = np.unique(np.array(rows), axis=0, return_counts=True)
        drawn = drawing.multinomial(len(rows), counts / len(rows), _DRAWS) @ distinct / len(rows)
        parts.append({name: (mean, drawn[:, i]) for i, (name, mean) in enumerate(zip(names, _mean(rows), strict=True))})
    common = [name for name in parts[0] if all(name in part for part in parts)]
    answer = {}
    for name in common:
        mean = math.fsum(part[name][0] for part in parts) / len(parts)
        low, high = np.quantile(np.mean([part[name][1] for part in parts], axis=0), _TAILS)
        answer[name] = Figure(mean, float(low), float(high))
    return answer


def _by_prompt(answers: Iterable[Answer]) -> tuple[list[str], list[list[float]]]:
    """Return the names of the figures, and a row of their values for each prompt."""
    prompts: dict[str, list[Answer]] = {}
    for answer in answers:
        prompts.setdefault(answer.example, []).append(answer)
    fewest = min(map(len, prompts.values()))
    ks = [*takewhile(lambda k: k < fewest, (2**power for power in range(1, 63))), *([fewest] if fewest > 1 else [])]
    rows = []
    for _example, given in sorted(prompts.items()):
        successes = sum(answer.success for answer in given)
        reward = math.fsum(answer.reward for answer in given) / len(given)
        rows.append([reward, successes / len(given), *(pass_at(k, len(given), successes) for k in ks)])
    return ["reward", "success", *(f"pass@{k}" for k in ks)], rows


def _mean(rows: Sequence[Sequence[float]]) -> list[float]:
    return [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)]
