"""Adds and removes grouping processes of a run by the rule of `pipeline.deployment.scaling`, under its supervisor.

A grouping process that is told to end commits what it has begun and releases its partitions, so no rollout is batched
twice. Static members do not leave their consumer group by themselves, so the supervisor removes them from it. A number
of processes that an operator sets overrides the rule for as long as it is set.

The ordinals of the processes begin at 0 and have no gaps, so a process that is added again gets its former name and
transactional id. Processes with the highest ordinals are removed: each is told to end, and finishes what it has begun.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from rollstream.consumers.grouping.config import GrouperConfig
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.deployment.description import GROUP, RoleDescription, process_name, role_of
from rollstream.pipeline.deployment.scaling import Autoscaler, bounds
from rollstream.pipeline.run.plan import ServicePorts, process_spec
from rollstream.pipeline.run.supervised_role import RoleSpec
from rollstream.topics.config import KafkaConfig
from rollstream.topics.decimal_numbers import decimal_number
from rollstream.topics.errors import RollstreamError
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.follower import TopicFollower
from rollstream.topics.kafka.groups import remove_members
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.logs import event
from rollstream.topics.records import Metrics
from rollstream.topics.wire.catalogue import topic_name

logger = logging.getLogger(__name__)


class ScaledRoles(Protocol):
    """The part of a supervisor that scaling needs."""

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the roles that run now."""

    def start(self, *specs: RoleSpec) -> None:
        """Start roles, without waiting until they are ready."""

    def retire(self, *names: str) -> None:
        """Tell roles to end, without waiting."""

    def holds(self, name: str) -> bool:
        """Whether a role runs, ends, or is to be started again."""


class NumberedProcesses:
    """The processes of one role."""

    def __init__(
        self,
        role: RoleDescription,
        processes: int,
        roles: ScaledRoles,
        ports: ServicePorts,
        spec: Callable[[int], RoleSpec],
        leave: Callable[[tuple[int, ...]], None] = lambda _ordinals: None,
    ) -> None:
        """`processes` is the number that already run. `leave` is called, in a separate thread, with the ordinals of
        processes that have ended."""
        self._role, self._roles, self._ports, self._spec, self._leave = role, roles, ports, spec, leave
        self.processes = processes
        """Number of processes that should run now."""
        self._wanted = processes
        self._ending: tuple[int, ...] = ()
        """Ordinals of processes that were told to end, until `leave` has returned for them."""
        self._leaving: threading.Thread | None = None

    @property
    def settled(self) -> bool:
        """Whether the wanted number of processes runs, and no process is ending."""
        return not self._ending and self._wanted == self.processes

    @property
    def ending(self) -> tuple[int, ...]:
        """Ordinals of processes that were told to end and may still run."""
        return self._ending

    def want(self, processes: int) -> None:
        """Set the wanted number of processes, which `poll` brings about."""
        self._wanted = processes

    def poll(self) -> None:
        """Start or end processes, once all that were told to end have ended. Call it often."""
        self._see_off()
        # A new process with the ordinal of one that is still ending would fence it before it has finished its work.
        if self._ending or self._wanted == self.processes:
            return
        event(logger, "scaled", role=self._role.name, processes=self.processes, wanted=self._wanted)
        more, fewer = range(self.processes, self._wanted), range(self._wanted, self.processes)
        self.processes = self._wanted
        self._roles.start(*map(self._spec, more))
        self._ending = tuple(fewer)
        self._roles.retire(*map(self._name, fewer))

    def _name(self, ordinal: int) -> str:
        return process_name(self._role, ordinal)

    def _see_off(self) -> None:
        if self._leaving is not None:
            if not self._leaving.is_alive():
                self._leaving, self._ending = None, ()
        elif self._ending and not any(self._roles.holds(self._name(ordinal)) for ordinal in self._ending):
            for ordinal in self._ending:
                self._ports.retire(self._name(ordinal))
            self._leaving = threading.Thread(target=self._leave, args=(self._ending,), daemon=True)
            self._leaving.start()


def leave_group(config: RunConfig, ordinals: tuple[int, ...]) -> None:
    """Remove grouping processes that have ended from their consumer group, because static members do not leave by
    themselves."""
    if config.kafka.group_protocol != "classic":
        return  # these members leave by themselves
    group = config.grouper.group_id(config.run)
    try:
        remove_members(config.kafka, group, [config.grouper.member(config.run, ordinal) for ordinal in ordinals])
    except RollstreamError as error:
        remedy = f"none needed: their partitions move after {config.kafka.session_timeout_s:g} s"
        event(logger, "members_not_removed", level=logging.WARNING, error=str(error), remedy=remedy)


_ROLE = role_of(GROUP)
AGAIN_S = 10.0
"""Time until gauges that could not be read are read again."""
_AT_ONCE = 1000


def at_first(config: RunConfig, running: int = 0) -> RunConfig:
    """Return the configuration with the number of grouping processes to begin with: as many as are `running`, or as
    configured if none are, within the rule's bounds."""
    least, most = bounds(config.grouper.autoscale, config.topics.partitions)
    processes = min(max(running or config.grouper.processes, least), most)
    return replace(config, grouper=replace(config.grouper, processes=processes))


def grouping_processes(config: RunConfig, path: Path, roles: ScaledRoles, ports: ServicePorts) -> NumberedProcesses:
    """Return the grouping processes of a run whose configuration is at `path`. They already run."""
    return NumberedProcesses(
        _ROLE,
        config.grouper.processes,
        roles,
        ports,
        lambda ordinal: process_spec(config, path, _ROLE, ordinal, expendable=True),
        lambda ordinals: leave_group(config, ordinals),
    )


class GroupScaler:
    """Decides every `grouper.autoscale.interval_s` how many grouping processes should run."""

    def __init__(
        self,
        config: RunConfig,
        path: Path,
        roles: ScaledRoles,
        ports: ServicePorts,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] = lambda _line: None,
    ) -> None:
        """`config` is the result of `at_first`; its grouping processes already run. They read their configuration from
        `path`. `say` is called when the gauges cannot be read, and when they can be read again. Raises TopicError or
        BrokerUnavailable."""
        self._config, self._clock, self._say = config, clock, say
        self._rule = config.grouper.autoscale
        self._partitions = config.topics.partitions
        self._numbered = grouping_processes(config, path, roles, ports)
        self._scaler = Autoscaler(self._rule, self._partitions, self.processes, clock())
        self._due = clock() + self._rule.interval_s
        self._follower: GaugeFollower | None = GaugeFollower(config.kafka, config.run, config.grouper)
        self._opening: threading.Thread | None = None
        self._open_at = 0.0
        self.gauges: GroupingGauges = self._follower.gauges
        """Lag and position of the run's grouping."""
        self.manual: int | None = None
        """Number of processes that an operator has set, or None if the rule decides."""

    @property
    def processes(self) -> int:
        """Number of grouping processes that should run now."""
        return self._numbered.processes

    @property
    def settled(self) -> bool:
        """Whether the last decision has been carried out and no process is still ending."""
        return self._numbered.settled

    def poll(self) -> None:
        """Read the gauges and, if it is time, decide on the number of processes. Call it often."""
        self._read()
        self._numbered.poll()
        if self.manual is not None:
            self._numbered.want(self.manual)
            return
        now = self._clock()
        if now < self._due or not self.settled or self.gauges.partitions < self._partitions:
            return
        self._due = now + self._rule.interval_s
        wanted = self._scaler.decide(self.gauges.lag, self.processes, now)
        if wanted != self.processes:
            event(logger, "lag_decided", lag=self.gauges.lag, processes=self.processes, wanted=wanted)
            self._numbered.want(wanted)
            self._numbered.poll()

    def close(self) -> None:
        """Stop reading the gauges."""
        if self._opening is not None:
            self._opening.join()
        if self._follower is not None:
            self._follower.close()

    def _read(self) -> None:
        if self._follower is None:
            self._open_again()
            return
        try:
            self._follower.poll()
        except RollstreamError as error:
            self._follower.close()
            self._follower = None
            self._open_at = self._clock() + AGAIN_S
            self._say(
                f"{error}; the run keeps {self.processes} grouping processes until their lag can be read again, which "
                f"is tried every {AGAIN_S:.0f} s"
            )

    def _open_again(self) -> None:
        """Follow the gauges again. A separate thread connects, because the brokers may not answer for a while."""
        if self._opening is not None:
            if not self._opening.is_alive():
                self._opening = None
                if self._follower is not None:
                    self._say("the lag of grouping can be read again")
        elif self._clock() >= self._open_at:
            self._open_at = self._clock() + AGAIN_S
            self._opening = threading.Thread(target=self._open, name="gauges", daemon=True)
            self._opening.start()

    def _open(self) -> None:
        try:
            follower = GaugeFollower(self._config.kafka, self._config.run, self._config.grouper)
        except RollstreamError as error:
            event(logger, "gauges_not_read", level=logging.WARNING, error=str(error), again_in_s=AGAIN_S)
            return
        self.gauges = follower.gauges
        self._follower = follower


class GroupingGauges:
    """The newest lag and position of each partition, from `metrics`. A partition keeps its last values while it moves
    from one process to another, so the total does not dip."""

    def __init__(self, group: str) -> None:
        """`group` is the full name of the consumer group."""
        self._group = group
        self._lags: dict[int, float] = {}
        self._positions: dict[int, float] = {}

    def add(self, record: Metrics) -> None:
        """Add the next record of the topic; records about anything else are ignored."""
        partition = decimal_number(record.labels.get("partition", ""))
        if record.labels.get("consumergroup") != self._group or partition is None:
            return
        for name, newest in (("lag", self._lags), ("position", self._positions)):
            if record.values.get(name, -1.0) >= 0:
                newest[partition] = record.values[name]

    @property
    def partitions(self) -> int:
        """Number of partitions whose lag is known."""
        return len(self._lags)

    @property
    def lag(self) -> int:
        """Number of records that wait, over all partitions with known lag."""
        return int(sum(self._lags.values()))

    @property
    def position(self) -> int:
        """Number of records read since the run began, over all partitions with a known position."""
        return int(sum(self._positions.values()))


class GaugeFollower:
    """Follows the gauges of a run from now on."""

    def __init__(self, kafka: KafkaConfig, run: str, grouper: GrouperConfig) -> None:
        topic = topic_name(run, "metrics")
        self._skipped = SkippedRecords("autoscaler")
        self._follower = TopicFollower(
            kafka, {(topic, partition): end for partition, (_low, end) in topic_admin.bounds(kafka, topic).items()}
        )
        self.gauges = GroupingGauges(grouper.group_id(run))

    def poll(self) -> None:
        """Process the records that have arrived, without waiting. Raises TopicError or BrokerUnavailable."""
        for message in self._follower.poll(_AT_ONCE, 0.0):
            record = self._skipped.decode(Metrics, message)
            if record is not None:
                self.gauges.add(record)

    def close(self) -> None:
        self._follower.close()
