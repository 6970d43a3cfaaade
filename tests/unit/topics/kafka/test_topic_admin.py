"""TopicWatch never waits for a broker; tests/model/test_grouper_process.py changes the setting of a real topic."""

import math
import socket

from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka.topic_admin import EVERY_S, TopicWatch
from tests.support.waiting import eventually


def test_a_broker_that_never_answers_delays_nothing_and_is_asked_again_once_the_time_has_come() -> None:
    now_s = 0.0
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        watch = TopicWatch(KafkaConfig(bootstrap_servers=f"{host}:{port}"), "r.rollouts", lambda: now_s)
        silent.setblocking(False)
        watch.poll()
        connection, _address = eventually(lambda: accepted(silent), 30, "the first request to begin")
        with connection:
            for _ in range(3):
                now_s += EVERY_S
                watch.poll()
            assert (watch.retention_s, watch.partitions) == (math.inf, 0)


def accepted(server: socket.socket) -> tuple[socket.socket, object] | None:
    try:
        return server.accept()
    except BlockingIOError:
        return None
