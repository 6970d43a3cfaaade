"""A streaming pipeline for reinforcement learning of language models over Apache Kafka."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
