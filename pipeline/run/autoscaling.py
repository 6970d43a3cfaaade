"""Adds and removes grouping processes of a run by the rule of `pipeline.deployment.scaling`, under its supervisor.

The processes have the ordinals from 0 on without gaps, so that a process that comes back has the transactional id it
had. The highest are removed: told to end, a process commits what it has begun and gives its partitions away, and
nothing is read twice. As static members do not leave their group by themselves, the supervisor removes them from it.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.deployment.description import GROUP, process_name, role_of
from rollstream.pipeline.deployment.scaling import Autoscaler, bounds
from rollstream.pipeline.run.grouping_gauges import GaugeFollower
from rollstream.pipeline.run.plan import process_spec
from rollstream.pipeline.run.service_ports import ServicePorts
from rollstream.pipeline.run.supervisor import RoleSpec
from rollstream.topics.errors import RollstreamError
from rollstream.topics.kafka.groups import remove_members
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)
_ROLE = role_of(GROUP)


class ScaledRoles(Protocol):
    """The part of a supervisor that scaling needs."""

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the roles that run now."""

    def start(self, *specs: RoleSpec) -> None:
        """Start roles, without waiting until they are ready."""

    def retire(self, *names: str) -> None:
        """Tell roles to end, without waiting."""


def at_first(config: RunConfig) -> RunConfig:
    """Return the configuration with as many grouping processes to begin with as the rule's bounds allow."""
    least, most = bounds(config.grouper.autoscale, config.topics.partitions)
    processes = min(max(config.grouper.processes, least), most)
    return replace(config, grouper=replace(config.grouper, processes=processes))


class GroupScaler:
    """Decides every `grouper.autoscale.interval_s` how many grouping processes there are."""

    def __init__(
        self,
        config: RunConfig,
        path: Path,
        roles: ScaledRoles,
        ports: ServicePorts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`config` is that of `at_first`, and lies at `path`; its grouping processes run already."""
        self._config, self._path, self._roles, self._ports, self._clock = config, path, roles, ports, clock
        self._rule = config.grouper.autoscale
        self._partitions = config.topics.partitions
        self.processes = config.grouper.processes
        """Grouping processes that there should be now."""
        self._scaler = Autoscaler(self._rule, self._partitions, self.processes, clock())
        self._due = clock() + self._rule.interval_s
        self._ending: list[int] = []
        """Ordinals of processes that were told to end, and have not left the group yet."""
        self._leaving: threading.Thread | None = None
        self._follower = GaugeFollower(config.kafka, config.run, config.grouper)
        self.gauges = self._follower.gauges
        """Lag and position of the run's grouping."""

    def poll(self) -> None:
        """Read the gauges and, if it is time, decide. Call it often. Raises TopicError or BrokerUnavailable."""
        self._follower.poll()
        self._see_off()
        now = self._clock()
        # While a process ends, another under its ordinal would fence it, and its partitions have no owner.
        if now < self._due or self._ending or self.gauges.partitions < self._partitions:
            return
        self._due = now + self._rule.interval_s
        wanted = self._scaler.decide(self.gauges.lag, self.processes, now)
        if wanted != self.processes:
            self._scale(wanted)

    @property
    def settled(self) -> bool:
        """Whether no process is ending."""
        return not self._ending

    def _scale(self, wanted: int) -> None:
        event(logger, "scaled", lag=self.gauges.lag, processes=self.processes, wanted=wanted)
        more, fewer = range(self.processes, wanted), range(wanted, self.processes)
        self.processes = wanted
        self._roles.start(*(process_spec(self._config, self._path, _ROLE, ordinal) for ordinal in more))
        self._ending = list(fewer)
        self._roles.retire(*(process_name(_ROLE, ordinal) for ordinal in fewer))

    def _see_off(self) -> None:
        """Remove processes that have ended from their group, and note when that is done."""
        if self._leaving is not None:
            if not self._leaving.is_alive():
                self._leaving, self._ending = None, []
        elif self._ending and not {process_name(_ROLE, ordinal) for ordinal in self._ending} & self._roles.pids.keys():
            for ordinal in self._ending:
                self._ports.retire(process_name(_ROLE, ordinal))
            self._leaving = threading.Thread(target=self._leave, args=(tuple(self._ending),), daemon=True)
            self._leaving.start()

    def _leave(self, ordinals: tuple[int, ...]) -> None:
        config = self._config
        if config.kafka.group_protocol != "classic":
            return  # these members leave by themselves
        group = config.grouper.group_id(config.run)
        try:
            remove_members(config.kafka, group, [config.grouper.member(config.run, ordinal) for ordinal in ordinals])
        except RollstreamError as error:
            remedy = f"none needed: their partitions move after {config.kafka.session_timeout_s:g} s"
            event(logger, "members_not_removed", level=logging.WARNING, error=str(error), remedy=remedy)

    def close(self) -> None:
        """Stop reading the gauges."""
        self._follower.close()
