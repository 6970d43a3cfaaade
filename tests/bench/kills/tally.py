"""The tally of a loop that was killed: each rollout that was handed over, and how often the model was trained on it."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Counts of the rollouts of a loop, after its end."""

    loop: str
    kills: Mapping[str, int]
    """Number of kills by process."""
    produced: int
    """Rollouts that were handed over: the call that took them had returned."""
    trained: int
    """Rollouts that the final parameters were trained on."""
    on_record: int
    """Rollouts that were dropped or skipped, with a reason on record."""
    doubled: int
    """Rollouts that the final parameters were trained on more than once."""
    lost: int
    """Rollouts that were produced, not trained on, and are on no record."""

    @classmethod
    def of(
        cls,
        loop: str,
        kills: Mapping[str, int],
        produced: Iterable[str],
        trained: Iterable[str],
        on_record: Iterable[str],
    ) -> "Tally":
        """Count uids; `trained` has a uid as often as it was trained on, `on_record` has those with another fate."""
        uids, times, left = {*produced}, Counter(trained), {*on_record}
        return cls(
            loop=loop,
            kills=dict(sorted(kills.items())),
            produced=len(uids),
            trained=len(times),
            on_record=len(left - times.keys()),
            doubled=sum(count > 1 for count in times.values()),
            lost=len(uids - times.keys() - left),
        )
