"""Steps of a run as its log has them, read without any code of the application."""

from confluent_kafka import Consumer, KafkaException, TopicPartition

from tests.faults.evidence import decode


def steps(bootstrap_servers: str, run: str, newest: int) -> list[tuple[int, int]]:
    """Time in milliseconds and number of the trained steps among the newest offsets; none while nobody answers."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": "steps",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "log_level": 0,
        }
    )
    found: list[tuple[int, int]] = []
    try:
        place = TopicPartition(f"{run}.steps", 0)
        _, end = consumer.get_watermark_offsets(place, timeout=10)
        consumer.assign([TopicPartition(place.topic, 0, max(0, end - newest))])
        # The end of the partition is reported as an error.
        while (message := consumer.poll(10)) is not None and message.error() is None:
            record = decode(message.value())
            if record is not None and record.name == "LearnerStep":
                found.append((message.timestamp()[1], int(record["step"])))
    except KafkaException:
        return []
    finally:
        consumer.close()
    return found


def last_step(bootstrap_servers: str, run: str) -> int:
    """Number of the newest trained step; -1 if there is none, or nobody answers."""
    return max((number for _, number in steps(bootstrap_servers, run, newest=4)), default=-1)
