"""ShardMember: sends the shards of a learner's process other than the lead.

It only writes chunks. The lead decides whether they become part of a version.
"""

import contextlib
import logging
import time

from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.content import Arrays
from rollstream.consumers.weights.file_publisher import FileWriter
from rollstream.consumers.weights.shard_barrier import Beginning, Channel, MemberBarrier
from rollstream.consumers.weights.shard_writer import ShardWriter, draft
from rollstream.topics.closing import Closing
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import brief
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)


class ShardMember(Closing):
    """A process that sends its tensors of each version; the lead's WeightsPublisher has the other end of `channel`."""

    def __init__(self, kafka: KafkaConfig, run: str, config: WeightsConfig, channel: Channel) -> None:
        """The settings must equal the lead's settings."""
        self._config = config
        self._writer = ShardWriter(kafka, run, config, FileWriter(run, config) if config.url else None)
        self._barrier = MemberBarrier(channel, config.shards_timeout_s)
        self._sent: tuple[int, Arrays] = (-1, {})
        """The last version that was sent and the arrays of this process; the lead says whether it was committed."""

    def contribute(self, arrays: Arrays) -> int:
        """Send the arrays of this process as its share of the version that the lead begins; return the version.

        If the lead publishes nothing after this step, sends nothing and returns -1. The arrays must not change
        afterwards. Raises ShardMissing if the lead sends no message in time, and DeliveryError if broker or store does
        not accept chunks. Errors are also reported to the lead.
        """
        beginning = self._barrier.begin()
        if beginning.version < 0:
            return -1
        try:
            self._send(beginning, arrays)
        except Exception as error:
            # Raise the error that stopped this process, not an error from reporting it to the lead.
            with contextlib.suppress(Exception):
                self._barrier.fail(brief(error))
            raise
        return beginning.version

    def close(self) -> None:
        """Wait until the broker has received everything that was sent."""
        self._writer.close()

    def _send(self, beginning: Beginning, arrays: Arrays) -> None:
        began = time.monotonic()
        before = self._sent[1] if self._sent[0] == beginning.base >= 0 else None
        self._sent = (-1, {})
        share = draft(arrays, before, alone=False)
        plan = self._barrier.plan(share.offer)
        shard = self._writer.send(share, plan, self._barrier.process, beginning.version, self._barrier.epoch)
        self._barrier.report(shard)
        if self._config.anchor_every > 1:
            self._sent = beginning.version, arrays
        event(
            logger,
            "shard_sent",
            version=beginning.version,
            process=self._barrier.process,
            tensors=len(shard.tensors),
            chunks=len(shard.chunks),
            full_bytes=shard.full_bytes,
            content_bytes=shard.content_bytes,
            seconds=round(time.monotonic() - began, 4),
        )
