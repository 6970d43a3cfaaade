"""Groups rollouts into training batches, exactly once: a pure fold over a partition and a thin transactional shell."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
