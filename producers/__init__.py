"""Producers of rollouts: environments, workers, the inference server, and the producer classes for any program."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
