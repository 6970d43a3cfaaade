"""The subject of `group-and-batch`: a process of the shell `rollstream group` runs, its transactions timed."""

import gc
import json
import sys
import threading
from collections.abc import Sequence
from typing import Any

from consumers.grouping import shell
from consumers.grouping.config import GrouperConfig, GroupingConfig
from consumers.grouping.publisher import Part, TransactionPublisher
from pipeline.roles.group import COLLECT_AFTER
from tests.bench.measure import Timing
from tests.bench.timer import TransactionTimer
from topics import logs
from topics.config import KafkaConfig


def group(arguments: dict[str, Any]) -> Timing:
    """Group until that many rollouts are committed."""
    done = threading.Event()
    timer = TransactionTimer(arguments["rollouts"] + arguments["partitions"], done)

    class Timed(TransactionPublisher):
        def _publish_as(self, member: object, parts: Sequence[Part]) -> None:
            super()._publish_as(member, parts)
            timer.committed(sum(p.output.journal.position - p.output.journal.begin for p in parts))

    shell.TransactionPublisher = Timed  # type: ignore[misc]
    gc.set_threshold(*COLLECT_AFTER)
    grouper = GrouperConfig(
        max_poll_records=arguments["poll_records"],
        commit_interval_s=arguments["commit_interval_s"],
    )
    kafka = KafkaConfig(bootstrap_servers=arguments["bootstrap_servers"])
    shell.run_grouping(kafka, arguments["run"], GroupingConfig(), grouper, 0, done, lambda: print("ready", flush=True))
    return timer.timing


if __name__ == "__main__":
    logs.setup()
    print(json.dumps(group(json.loads(sys.argv[1]))._asdict()))
