"""The rule that adds and removes grouping processes: the total lag divided by a target per process, as in Kubernetes.

`rollstream run` applies the rule itself; on Kubernetes a ScaledObject of KEDA does: its prometheus trigger has
`lag_query` as its query, `lag_per_process` as its threshold (metricType AverageValue), and the same bounds. A
HorizontalPodAutoscaler then wants ceil(total / target) processes, unless total / (target * processes) is within a
tolerance of 1, and removes processes only if it wanted fewer throughout a window:
https://kubernetes.io/docs/concepts/workloads/autoscaling/horizontal-pod-autoscale/#algorithm-details.

KEDA's own kafka trigger is not suitable: transaction markers occupy offsets, too, so the lag that it sees is never
zero (https://github.com/kedacore/keda/issues/5675).
"""

import math
from collections import deque
from collections.abc import Iterable

from rollstream.consumers.grouping.config import AutoscaleConfig

TOLERANCE = 0.1
"""Largest relative distance of the lag from its target that changes nothing; the default of Kubernetes."""


def lag_query(run: str) -> str:
    """Return the Prometheus query for the total lag of a run's grouping, in records."""
    return f'sum(rollstream_grouping_lag{{run="{run}"}})'


def bounds(rule: AutoscaleConfig, partitions: int) -> tuple[int, int]:
    """Return the fewest and the most processes: more processes than partitions would have nothing to do."""
    most = min(rule.max_processes or partitions, partitions)
    return min(rule.min_processes, most), most


def recommended(rule: AutoscaleConfig, partitions: int, lag: float, processes: int) -> int:
    """Return the wanted number of processes for this total lag, given the current number."""
    least, most = bounds(rule, partitions)
    needed = math.ceil(lag / rule.lag_per_process)
    if processes > 0 and 1 - TOLERANCE <= lag / (rule.lag_per_process * processes) <= 1 + TOLERANCE:
        needed = processes
    return min(max(needed, least), most)


def stabilized(recommendations: Iterable[int], processes: int) -> int:
    """Return the number of processes to run, from the numbers wanted within the window, the newest last.

    Processes are added at once, but removed only once every number wanted within the window is lower.
    """
    recent = list(recommendations)
    return max(recent[-1], min(processes, max(recent)))


class Autoscaler:
    """Applies the rule repeatedly over time."""

    def __init__(self, rule: AutoscaleConfig, partitions: int, processes: int, now_s: float) -> None:
        """Start with the current number of `processes`, which counts as wanted until the first window has passed."""
        self._rule, self._partitions = rule, partitions
        self._wanted = deque([(now_s, processes)])

    def decide(self, lag: float, processes: int, now_s: float) -> int:
        """Return the number of processes to run from now on; `now_s` never decreases."""
        self._wanted.append((now_s, recommended(self._rule, self._partitions, lag, processes)))
        while self._wanted[0][0] < now_s - self._rule.cooldown_s:
            self._wanted.popleft()
        least, most = bounds(self._rule, self._partitions)
        return min(max(stabilized((count for _at, count in self._wanted), processes), least), most)
