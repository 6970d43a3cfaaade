"""Schemas, the catalogue of topics, the codec, Kafka clients and provisioning. Imports no other rollstream package."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
