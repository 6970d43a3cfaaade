"""Infrastructure of a run: a local Kafka broker in one command."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
