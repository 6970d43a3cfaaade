"""Sends a worker's rollouts to `rollouts`, or to `unlabelled` if a labeler gives them their rewards."""

from collections.abc import Callable, Collection
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from rollstream.producers.record_sender import RolloutDelivery
from rollstream.producers.rollout_producer import RolloutProducer
from rollstream.topics.config import KafkaConfig
from rollstream.topics.records import GroupCancelled, Rollout


class RolloutOutlet:
    """Sends rollouts and cancellations of one run as a RolloutProducer does, each rollout to the topic it belongs to.

    Use it as a context manager.
    """

    def __init__(
        self,
        kafka: KafkaConfig,
        run: str,
        *,
        labeled: Collection[str] = (),
        on_delivery: Callable[[RolloutDelivery], None],
        on_unlabeled: Callable[[RolloutDelivery], None],
    ) -> None:
        """`labeled` are the environments whose rewards come from a labeler; `on_unlabeled` is called for each of their
        acknowledged rollouts, `on_delivery` for every other one. Raises BrokerUnavailable or TopicError."""
        self._labeled = frozenset(labeled)
        with ExitStack() as stack:
            self._rollouts = stack.enter_context(RolloutProducer(kafka, run, on_delivery=on_delivery))
            self._producers = [self._rollouts]
            if self._labeled:
                self._unlabelled = stack.enter_context(
                    RolloutProducer(kafka, run, topic="unlabelled", on_delivery=on_unlabeled)
                )
                self._producers.append(self._unlabelled)
            self._stack = stack.pop_all()

    @property
    def send_timeout_s(self) -> float:
        """Longest time for which a rollout waits while the queue is full."""
        return self._rollouts.send_timeout_s

    def awaits_label(self, environment: str) -> bool:
        """Whether rollouts of an environment get their rewards from a labeler."""
        return environment in self._labeled

    def send(self, rollout: Rollout, *, timeout_s: float | None = None) -> None:
        """Queue a rollout. Raises as RolloutProducer.send does."""
        producer = self._unlabelled if self.awaits_label(rollout.environment) else self._rollouts
        producer.send(rollout, timeout_s=timeout_s)

    def cancel(self, cancelled: GroupCancelled, *, timeout_s: float | None = None) -> None:
        """Queue a cancellation, which needs no label. Raises as RolloutProducer.cancel does."""
        self._rollouts.cancel(cancelled, timeout_s=timeout_s)

    def poll(self) -> None:
        """Run the callbacks of delivered records. Raises DeliveryError."""
        for producer in self._producers:
            producer.poll()

    def flush(self, timeout_s: float) -> None:
        """Wait until every record sent is on the log. Raises DeliveryError, DeadlineExceeded."""
        for producer in self._producers:
            producer.flush(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)
