"""Ends a role, as SIGTERM does, once its run is split; some roles also end when the run is drained.

A role of a split run refuses to start. While a run is split, other roles still need servers that answer and labelers
that finish groups, so these end last. The roles `engine` and `fill` do not follow splits.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing

from rollstream.pipeline.roles.broker_wait import wait_for_broker
from rollstream.topics.catalogue import topic_name
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import RollstreamError
from rollstream.topics.kafka.follower import TopicFollower
from rollstream.topics.kafka.records import BEGINNING, KafkaRecord
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.logs import event
from rollstream.topics.records import RunSplit
from rollstream.topics.run_splits import SUCCESSOR_KEY, check_open
from rollstream.topics.steering import DesiredState

logger = logging.getLogger(__name__)
_POLL_S = 1.0
_REST_S = 5.0
Ends = Callable[[DesiredState], bool]
"""Returns whether the state that operators want ends a role."""


def end_with_split(
    kafka: KafkaConfig, run: str, also: Ends = lambda _state: False, *, last: bool = False
) -> threading.Event:
    """Stop this process by SIGTERM once its run is split, or once `also` returns true; return an event that is set just
    before, and not by any other SIGTERM. With `last`, wait until the successor of a split run is open, so that a split
    that is given up does not stop this process. Raises StateRefused if the split would stop this process already, or if
    the run is still being filled. A broker is waited for first, as `wait_for_broker` does."""
    wait_for_broker(kafka)
    check_open(kafka, run, while_closing=last)
    over = threading.Event()
    threading.Thread(target=_follow, args=(kafka, run, also, last, over), name="control", daemon=True).start()
    return over


def _follow(kafka: KafkaConfig, run: str, also: Ends, last: bool, over: threading.Event) -> None:
    while True:
        try:
            if _ends(kafka, run, also, last):
                over.set()
                os.kill(os.getpid(), signal.SIGTERM)
            return
        except RollstreamError:
            time.sleep(_REST_S)


def _ends(kafka: KafkaConfig, run: str, also: Ends, last: bool) -> bool:
    """Wait until the run ends for this process; the return value is always true."""
    state, skipped = DesiredState(), SkippedRecords(logged=False)
    topic = topic_name(run, "control")
    with closing(TopicFollower(kafka, {(topic, 0): BEGINNING})) as follower:
        while True:
            for message in follower.poll(100, _POLL_S):
                if message.key != SUCCESSOR_KEY:
                    state.note(message, skipped)
                elif message.value is not None and (not last or _is_over(message, skipped)):
                    event(logger, "run_split", run=run)
                    return True
            # Before the end of the topic is read, a request that was withdrawn later may still seem valid.
            if (topic, 0) in follower.caught_up and also(state):
                event(logger, "run_drained", run=run)
                return True


def _is_over(message: KafkaRecord, skipped: SkippedRecords) -> bool:
    """Whether the successor of the split run is open."""
    split = skipped.decode(RunSplit, message)
    return split is not None and split.phase == "moved"
