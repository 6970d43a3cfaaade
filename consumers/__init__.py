"""Readers of the log: grouping, the batch reader, the learner, weights, archives and labeling."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
