"""The process that `group-and-batch` measures: it groups as the role `group` does, and times its transactions."""

import gc
import json
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rollstream.consumers.grouping.config import GrouperConfig, GroupingConfig
from rollstream.consumers.grouping.core.grouping_task import TaskCommit
from rollstream.consumers.grouping.process import grouping_process
from rollstream.consumers.grouping.process.committer import TransactionPublisher
from rollstream.pipeline.roles.group import COLLECT_AFTER
from rollstream.topics import logs
from rollstream.topics.config import KafkaConfig
from tests.bench.measure import Timing
from tests.bench.timer import TransactionTimer


@contextmanager
def grouping_collector() -> Iterator[None]:
    """Set the thresholds of the garbage collector as `rollstream role group` does, while the block runs."""
    before = gc.get_threshold()
    gc.set_threshold(*COLLECT_AFTER)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def group(arguments: dict[str, Any]) -> Timing:
    """Group until the requested number of records is committed."""
    done = threading.Event()
    timer = TransactionTimer(arguments["rollouts"] + arguments["partitions"], done)

    class Timed(TransactionPublisher):
        def _publish_as(self, member: object, parts: Sequence[TaskCommit]) -> None:
            super()._publish_as(member, parts)
            timer.committed(sum(p.effects.journal.position - p.effects.journal.begin for p in parts))

    grouping_process.TransactionPublisher = Timed  # type: ignore[misc]
    grouper = GrouperConfig(
        max_poll_records=arguments["poll_records"],
        commit_interval_s=arguments["commit_interval_s"],
    )
    kafka = KafkaConfig(bootstrap_servers=arguments["bootstrap_servers"])
    with grouping_collector():
        grouping_process.run_grouping(
            kafka, arguments["run"], GroupingConfig(), grouper, 0, done, lambda: print("ready", flush=True)
        )
    return timer.timing


if __name__ == "__main__":
    logs.setup()
    print(json.dumps(group(json.loads(sys.argv[1]))._asdict()))
