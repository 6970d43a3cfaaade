"""The wire: schemas, the catalogue of topics, codec, Kafka clients, provisioning. Imports no other package here."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
