"""The training steps of a learner: one for new steps, and others for recorded steps with earlier rules."""

from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.step_rules import NEWEST, StepRules
from rollstream.consumers.learner.training.train_step import TrainStep


class TrainSteps:
    """The compiled functions of one configuration, by the rules of a step. All take the same states."""

    def __init__(self, config: LearnerConfig) -> None:
        self.newest = TrainStep(config)
        """Computes new steps."""
        self._by_rules = {NEWEST: self.newest}

    def of(self, rules: StepRules) -> TrainStep:
        """Return the training step that follows `rules`; functions for earlier rules compile when they first run."""
        if rules not in self._by_rules:
            self._by_rules[rules] = TrainStep(self.newest.config, self.newest.mesh, rules)
        return self._by_rules[rules]
