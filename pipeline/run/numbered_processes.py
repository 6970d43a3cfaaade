"""Starts and ends processes of one role, so that the wanted number of them runs.

The ordinals of the processes begin at 0 and have no gaps, so a process that is added again gets its former name and
transactional id. Processes with the highest ordinals are removed: each is told to end, and finishes what it has begun.
"""

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.deployment.description import RoleDescription, process_name
from rollstream.pipeline.run.plan import ServicePorts
from rollstream.pipeline.run.supervised_role import RoleSpec
from rollstream.topics.errors import RollstreamError
from rollstream.topics.kafka.groups import remove_members
from rollstream.topics.logs import event

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
