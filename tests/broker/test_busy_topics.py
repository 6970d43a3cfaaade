"""Readers reach the end that a topic had even if producers never pause, so that no fetch returns nothing."""

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

from rollstream.pipeline.run.observer import RunObserver
from rollstream.pipeline.tools.cat import ReadSpan, messages
from rollstream.pipeline.tools.top import NEWEST
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.follower import TopicFollower
from rollstream.topics.kafka.reader import Reader, read_to_end
from rollstream.topics.kafka.records import BEGINNING
from rollstream.topics.kafka.sender import Sender
from rollstream.topics.records import LearnerStep
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from tests.support.batches import index_entry
from tests.support.runs import RealRun

BEFORE = 20
"""Records that are in the topic before it is read."""
MOST = 4000
"""A reader that waits for a pause of the producer gets this many records first, after 20 s or more."""
PACE_S = 0.005
LONG_MS = 500
"""A broker waits this long for a record before it answers that there is none."""


@contextmanager
def written_steadily(run: RealRun) -> Iterator[str]:
    """The batch index of a run, to which entries are added all the time."""
    topic, stop = run.topic("batch-index"), threading.Event()

    with Sender(clients.producer(run.kafka, **{"linger.ms": 0})) as sender:

        def send(number: int) -> None:
            made = index_entry(number)
            sender.send(topic, encode(made), encode_key(made.batch_id))

        def write() -> None:
            number = BEFORE
            while not stop.wait(PACE_S):
                send(number)
                number += 1

        for number in range(BEFORE):
            send(number)
        sender.flush(60)
        writer = threading.Thread(target=write)
        writer.start()
        try:
            yield topic
        finally:
            stop.set()
            writer.join()


def test_a_topic_that_is_written_to_all_the_time_is_read_to_its_end(run: RealRun) -> None:
    with written_steadily(run) as topic, Reader(run.kafka, fetch_wait_ms=LONG_MS) as reader:
        for _turn in range(2):  # the reader knows an earlier end in the second turn
            before = len([*read_to_end(run.kafka, topic)])
            count = 0
            for _record in read_to_end(run.kafka, topic, reader=reader):
                count += 1
                assert count < MOST
            assert before <= count
            assert before >= BEFORE


def test_cat_prints_a_topic_that_is_written_to_all_the_time_to_its_end(run: RealRun) -> None:
    with written_steadily(run) as topic:
        count = 0
        for _record in messages(run.kafka, topic, ReadSpan()):
            count += 1
            assert count < MOST
        assert count >= BEFORE


def test_a_follower_catches_up_with_a_topic_that_is_written_to_all_the_time(run: RealRun) -> None:
    with written_steadily(run) as topic:
        place, count = (topic, 0), 0
        with TopicFollower(run.kafka, {place: BEGINNING}, **{"fetch.wait.max.ms": LONG_MS}) as follower:
            while place not in follower.caught_up:
                count += len(follower.poll(100, 0.1))
                assert count < MOST
        assert count >= BEFORE


def test_an_observer_sees_the_steps_of_a_run_whose_batches_come_all_the_time(run: RealRun) -> None:
    made = LearnerStep(
        learner="test",
        step=7,
        input_run=run.name,
        uses=(),
        position=0,
        policy_version=0,
        params_digest="digest",
        trained_total=0,
        skipped_total=0,
    )
    with written_steadily(run):
        with Sender(clients.producer(run.kafka)) as sender:
            sender.send(run.topic("steps"), encode(made), encode_key("test", 7))

        with closing(RunObserver(run.kafka, run.name)) as observer:

            def tell() -> None:
                assert observer.batches < MOST

            observer.catch_up(tell)
            assert observer.snapshot(NEWEST).step == 7
