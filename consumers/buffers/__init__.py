"""Replay buffers and stores: views of the log, filled from topics and restored by position; they can also be filled by
hand."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
