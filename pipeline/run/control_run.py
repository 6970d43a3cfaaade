"""`rollstream run` of a control task: collect, label and fill, until everything collected is labeled and filled in.

A run without collecting processes goes on until it is stopped.
"""

import logging
import time
from collections.abc import Callable

from rollstream.consumers.buffers.trajectories.filler import filler_positions
from rollstream.consumers.grouping.process.bootstrap import committed_offsets
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.deployment.description import COLLECT
from rollstream.pipeline.run.plan import RunPlan
from rollstream.pipeline.run.supervisor import Supervisor
from rollstream.topics.errors import AccessDenied, BrokerUnavailable
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.logs import event
from rollstream.topics.wire.catalogue import topic_name

logger = logging.getLogger(__name__)

_POLL_S = 0.25
_LOOK_S = 1.0
"""Time between checks of how far the log was read."""


def watch(config: RunConfig, supervisor: Supervisor, roles: RunPlan, look: Callable[[], None]) -> None:
    """Watch the roles until every collector has finished and its trajectories are labeled and filled in.

    `look` is called several times a second.
    """
    collectors = roles.of(COLLECT)
    while not (collectors and all(supervisor.finished(spec.name) for spec in collectors)):
        supervisor.poll(_POLL_S)
        look()
    # Filling is checked last, because labeling writes trajectories until it has read everything.
    for behind in (is_labeling_behind, _is_filling_behind):
        while _is_behind_or_unknown(behind, config):
            wait_until = time.monotonic() + _LOOK_S
            while time.monotonic() < wait_until:
                supervisor.poll(_POLL_S)
                look()


def _is_behind_or_unknown(behind: Callable[[RunConfig], bool], config: RunConfig) -> bool:
    """Whether records wait, or no broker tells: labelers and fillers outlive such an outage, and so does the run."""
    try:
        return behind(config)
    except AccessDenied:
        raise
    except BrokerUnavailable as error:
        event(logger, "progress_unknown", level=logging.WARNING, error=str(error), again_in_s=_LOOK_S)
        return True


def is_labeling_behind(config: RunConfig) -> bool:
    """Whether a record waits for a labeler of this run."""
    if not config.labelers:
        return False
    topic, group = topic_name(config.run, "unlabelled"), config.labeling.group_id(config.run)
    offsets = committed_offsets(config.kafka, group, topic, len(topic_admin.bounds(config.kafka, topic)))
    committed = {tp.partition: tp.offset for tp in offsets}
    return _is_behind(config, "unlabelled", committed)


def _is_filling_behind(config: RunConfig) -> bool:
    if not config.fill.directory:
        return False
    return _is_behind(config, "trajectories", filler_positions(config.kafka, config.run).get(config.fill.name, {}))


def _is_behind(config: RunConfig, topic: str, positions: dict[int, int]) -> bool:
    """Whether a record remains at or after these positions. End offsets cannot tell: they count markers, too."""
    full = topic_name(config.run, topic)
    bounds = topic_admin.bounds(config.kafka, full)
    start = {p: max(begin, positions.get(p, begin)) for p, (begin, _end) in bounds.items()}
    return any(True for _record in read_to_end(config.kafka, full, start=start))
