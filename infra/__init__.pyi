from .broker import LocalBroker
from .cluster import LocalCluster
from .config import BrokerConfig
from .testing import KafkaContainer

__all__ = ["BrokerConfig", "KafkaContainer", "LocalBroker", "LocalCluster"]
