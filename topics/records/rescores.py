"""Records of `rescores`: rewards that a verifier computed for rollouts that had been rewarded before."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class RescoredRollout:
    """The reward of one rollout by another verifier, or the reason why there is none."""

    rescoring: str
    verifier: str
    verifier_digest: str
    verifier_version: str = ""
    partition: int
    offset: int
    uid: str
    environment: str
    reward_before: float
    reward: float = math.nan
    components: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""
    wall_time: float = 0.0

    @property
    def changed(self) -> bool:
        """Whether the verifier gave a reward that differs from the earlier reward."""
        return not self.failure and self.reward != self.reward_before
