from .config import WeightsConfig
from .follower import WeightsFollower
from .publisher import WeightsPublisher
from .state_manager import LocalStateManager, StateManager

__all__ = ["LocalStateManager", "StateManager", "WeightsConfig", "WeightsFollower", "WeightsPublisher"]
