"""Weights through the log: the publisher of policy versions, and the follower, which only returns whole versions."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
