"""Changes settings of topics for tests, and returns once the broker obeys them.

A broker answers a change once it is decided, but obeys it only once it has read it, later on a busy machine.
"""

from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource

from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka import clients
from tests.support.waiting import eventually

_TIMEOUT_S = 60.0
_LAST = "file.delete.delay.ms"
"""A setting that means nothing to tests."""


def change_settings(kafka: KafkaConfig, topic: str, **values: object) -> None:
    """Change settings of a topic; their names are written with __ for the dot.

    A broker applies changes one after the other, and describes each when it begins to apply it. So once it describes a
    later change, it obeys the earlier ones.
    """
    _change(kafka, topic, {name.replace("__", "."): str(value) for name, value in values.items()})
    _change(kafka, topic, {_LAST: str(int(_described(kafka, topic)[_LAST]) + 1)})


def _change(kafka: KafkaConfig, topic: str, values: dict[str, str]) -> None:
    entries = [ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET) for name, value in values.items()]
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=entries)
    client = clients.admin(kafka)
    client.incremental_alter_configs([resource])[resource].result(_TIMEOUT_S)
    eventually(lambda: values.items() <= _described(kafka, topic).items(), _TIMEOUT_S, f"{topic} has {values}")


def _described(kafka: KafkaConfig, topic: str) -> dict[str, str]:
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
    client = clients.admin(kafka)  # its answers end with it
    entries = client.describe_configs([resource])[resource].result(_TIMEOUT_S)
    return {name: entry.value for name, entry in entries.items()}
