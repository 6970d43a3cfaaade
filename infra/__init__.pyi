from .broker.broker import LocalBroker
from .broker.cluster import LocalCluster
from .config import BrokerConfig
from .testing import KafkaContainer

__all__ = ["BrokerConfig", "KafkaContainer", "LocalBroker", "LocalCluster"]
