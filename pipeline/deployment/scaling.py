"""The rule by which grouping processes are added and removed: total lag over a target for each, as Kubernetes has it.

Pure, and the one place of the rule. `rollstream run` applies it itself; on Kubernetes a ScaledObject of KEDA does: its
prometheus trigger has `lag_query` as its query, `lag_per_process` as its threshold (metricType AverageValue), and the
same bounds. A HorizontalPodAutoscaler then wants ceil(total / target) processes, unless total / (target * processes) is
within a tolerance of 1, and removes none while it wanted more at any time within a window:
https://kubernetes.io/docs/concepts/workloads/autoscaling/horizontal-pod-autoscale/#algorithm-details.

KEDA's own kafka trigger does not serve: commits of transactions are offsets, too, so the lag that it sees never is zero
(https://github.com/kedacore/keda/issues/5675).
"""

import math
from collections import deque
from collections.abc import Iterable

from rollstream.consumers.grouping.config import AutoscaleConfig

TOLERANCE = 0.1
"""Least relative distance of the lag from its target that changes anything; the default of Kubernetes."""


def lag_query(run: str) -> str:
    """Return the query of Prometheus for the total lag of a run's grouping, in records."""
    return f'sum(rollstream_grouping_lag{{run="{run}"}})'


def bounds(rule: AutoscaleConfig, partitions: int) -> tuple[int, int]:
    """Return the fewest and the most processes: one beyond the number of partitions would have nothing to do."""
    most = min(rule.max_processes or partitions, partitions)
    return min(rule.min_processes, most), most


def recommended(rule: AutoscaleConfig, partitions: int, lag: float, processes: int) -> int:
    """Return how many processes there should be with this total lag, now that there are so many."""
    least, most = bounds(rule, partitions)
    wanted = math.ceil(lag / rule.lag_per_process)
    if processes > 0 and 1 - TOLERANCE <= lag / (rule.lag_per_process * processes) <= 1 + TOLERANCE:
        wanted = processes
    return min(max(wanted, least), most)


def stabilized(wanted: Iterable[int], processes: int) -> int:
    """Return how many processes there should be, from what was wanted within the window, the newest last.

    More are added at once; those there are remain while any number wanted within the window was as high.
    """
    recent = list(wanted)
    return max(recent[-1], min(processes, max(recent)))


class Autoscaler:
    """Applies the rule at one time after the other."""

    def __init__(self, rule: AutoscaleConfig, partitions: int, processes: int, now_s: float) -> None:
        """`processes` are those that there are now, which counts as wanted until the first window has passed."""
        self._rule, self._partitions = rule, partitions
        self._wanted = deque([(now_s, processes)])

    def decide(self, lag: float, processes: int, now_s: float) -> int:
        """Return how many processes there should be from now on; `now_s` never falls."""
        self._wanted.append((now_s, recommended(self._rule, self._partitions, lag, processes)))
        while self._wanted[0][0] < now_s - self._rule.cooldown_s:
            self._wanted.popleft()
        least, most = bounds(self._rule, self._partitions)
        return min(max(stabilized((count for _at, count in self._wanted), processes), least), most)
