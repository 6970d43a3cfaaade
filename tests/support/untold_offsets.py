"""A role to which the broker does not tell the offset of its first record to some topics, as it may not for a record
that was sent to it twice."""

_SCRIPT = """
import sys
from rollstream.topics.kafka import sender

untold = {topics!r}

class Untold(sender.Delivery):
    def __new__(cls, topic, partition, offset, *times):
        name = topic.rpartition(".")[2]
        if name in untold:
            untold.remove(name)
            offset = None
        return delivery(topic, partition, offset, *times)

delivery, sender.Delivery = sender.Delivery, Untold
from rollstream.pipeline.cli import main
sys.exit(main(sys.argv[1:]))
"""


def without_first_offsets(*topics: str) -> str:
    """Return the script of such a role."""
    return _SCRIPT.format(topics=set(topics))
