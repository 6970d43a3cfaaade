"""Means of the components of rewards, each over the rollouts that have it."""

from collections import Counter
from collections.abc import Mapping


class ComponentMeans:
    """Running means by component. An environment may report a component for some rollouts only."""

    def __init__(self) -> None:
        self._totals: Counter[str] = Counter()
        self._rollouts: Counter[str] = Counter()

    def add(self, components: Mapping[str, float]) -> None:
        """Add the components of one rollout."""
        self._totals.update(components)
        self._rollouts.update(components.keys())

    def means(self) -> dict[str, float]:
        """Return the mean of each component."""
        return {name: total / self._rollouts[name] for name, total in sorted(self._totals.items())}
