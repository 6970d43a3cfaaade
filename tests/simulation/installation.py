"""Puts the model in the place of the Kafka clients, of threads and of the clock; all else is the code that ships."""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import pytest
from confluent_kafka import Consumer, Producer

from rollstream.consumers import transactions as publishing
from rollstream.consumers.grouping.process import punctuator
from rollstream.consumers.grouping.process.punctuator import BrokerClock
from rollstream.topics.kafka import clients, groups, hanging_transactions, open_transactions
from rollstream.topics.kafka import reader as kafka_reader
from rollstream.topics.kafka import transactions as producing
from rollstream.topics.kafka.client_calls import Stalled
from tests.simulation.cluster import OUTSIDE, Cluster
from tests.simulation.model_admin import ModelAdmin
from tests.simulation.model_consumer import ModelConsumer
from tests.simulation.model_producer import ModelProducer
from tests.simulation.scheduler import Actor, Hanging, Process, Scheduler

T = TypeVar("T")


class World:
    """The cluster of the schedule that runs now."""

    cluster: Cluster
    connect_s = 0.0
    """How long a client takes to connect."""

    def begin(self, seed: int = 0, most_steps: int = 60_000) -> Cluster:
        """Put an empty cluster in place."""
        OUTSIDE.alive = True  # the end of another schedule ended it
        OUTSIDE.actors.clear()
        self.cluster = Cluster(Scheduler(seed, most_steps))
        return self.cluster

    def result_of(self, work: Callable[[], T]) -> T:
        """Return the result of a process of its own, or raise its error."""
        actor = self.scheduler.spawn(Process("test"), "test", work)
        self.scheduler.run(lambda: actor.done)
        if actor.error is not None:
            raise actor.error
        result: T = actor.result
        return result

    @property
    def scheduler(self) -> Scheduler:
        return self.cluster.scheduler

    def client(self, kind: Callable[[dict[str, Any]], Any], settings: dict[str, Any]) -> Any:
        """Build a client as `clients` asks for it."""
        if self.connect_s:
            self.scheduler.sleep(self.connect_s)
        if isinstance(kind, type) and issubclass(kind, Producer):
            return ModelProducer(self.cluster, settings)
        if kind is Consumer:
            return ModelConsumer(self.cluster, settings)
        return ModelAdmin(self.cluster)


class ModelFuture:
    """The result of a call on another thread."""

    def __init__(self, scheduler: Scheduler, actor: Actor) -> None:
        self._scheduler, self._actor = scheduler, actor

    def done(self) -> bool:
        return self._actor.done

    def result(self) -> Any:
        self._scheduler.wait(lambda: self._actor.done, 1e9)
        if self._actor.error is not None:
            raise self._actor.error
        return self._actor.result


@contextmanager
def installed(world: World) -> Iterator[None]:
    """Run the block over `world`, whose cluster the caller sets for each schedule."""

    class ModelCalls:
        """BoundedCalls on actors instead of threads."""

        def run(self, call: Callable[[], Any], name: str, timeout_s: float) -> Any:
            try:
                return call()
            except Hanging:
                world.scheduler.sleep(timeout_s)
                raise Stalled(f"{name} did not return within {timeout_s:g} s") from None

        def submit(self, call: Callable[[], Any]) -> ModelFuture:
            process = world.scheduler.process or OUTSIDE
            return ModelFuture(world.scheduler, world.scheduler.spawn(process, "publisher", call))

        def close(self) -> None:
            pass

    def now() -> float:
        return world.scheduler.now_s

    def sleep(for_s: float) -> None:
        world.scheduler.sleep(for_s)

    home = threading.get_ident()

    def at_home(modelled: Callable[..., T], real: Callable[..., T]) -> Callable[..., T]:
        """Model a function for this thread, on which all actors run, and not for one that an earlier test left."""
        return lambda *words: (modelled if threading.get_ident() == home else real)(*words)

    def nothing_hangs(*_arguments: Any) -> str:
        return "no broker to ask"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clients, "_built", world.client)
        patch.setattr(publishing, "BoundedCalls", ModelCalls)
        patch.setattr(producing, "BoundedCalls", ModelCalls)
        patch.setattr(kafka_reader, "BoundedCalls", ModelCalls)
        patch.setattr(groups, "BoundedCalls", ModelCalls)
        patch.setattr(punctuator, "BrokerClock", partial(BrokerClock, now, now))
        for name in ("open_on", "open_on_offsets"):
            patch.setattr(hanging_transactions, name, nothing_hangs)
        patch.setattr(open_transactions, "open_on", nothing_hangs)
        patch.setattr(random, "uniform", lambda least, most: world.scheduler.rng.uniform(least, most))
        patch.setattr(time, "time", at_home(now, time.time))
        patch.setattr(time, "monotonic", at_home(now, time.monotonic))
        patch.setattr(time, "sleep", at_home(sleep, time.sleep))
        level = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(level)
