"""Starts and ends processes so that a run has the numbers of processes that operators want.

The configuration file of the processes keeps the configured numbers. A process whose work depends on these numbers
follows the topic `control` itself.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rollstream.infra.broker.ports import is_free
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.control.steering import REPLICAS, SCALED
from rollstream.pipeline.deployment.description import ENV, EVAL, GATEWAY, GROUP, INFER, counts, process_name, role_of
from rollstream.pipeline.run import plan as plans
from rollstream.pipeline.run.autoscaling import GroupScaler, NumberedProcesses, ScaledRoles, grouping_processes
from rollstream.pipeline.run.plan import ServicePorts
from rollstream.pipeline.run.run_environments import played_by
from rollstream.pipeline.run.supervised_role import RoleSpec
from rollstream.topics.control.steering import EVALUATE, NOW, PROCESSES, DesiredState
from rollstream.topics.errors import ConfigurationError, RollstreamError
from rollstream.topics.logs import event
from rollstream.topics.records import DesiredProcesses, EvaluationRequest

logger = logging.getLogger(__name__)


def with_numbers(config: RunConfig, numbers: Mapping[str, int]) -> RunConfig:
    """Return the configuration with these numbers of processes, for the roles that the run has. Raises
    ConfigurationError if the run cannot work with them."""
    there = counts(config)
    if ENV in numbers:
        config = replace(config, supervisor=replace(config.supervisor, workers=numbers[ENV]))
    if GROUP in numbers and GROUP in there:
        processes = min(numbers[GROUP], config.topics.partitions)
        config = replace(config, grouper=replace(config.grouper, processes=processes))
    if INFER in numbers and INFER in there:
        config = replace(config, inference=replace(config.inference, replicas=numbers[INFER]))
    if GATEWAY in numbers and GATEWAY in there:
        config = replace(config, gateway=replace(config.gateway, processes=numbers[GATEWAY]))
    if EVAL in numbers and EVAL in there:
        config = replace(config, evaluation=replace(config.evaluation, processes=numbers[EVAL]))
    return config


def begin_with(config: RunConfig, state: DesiredState, running: Collection[str] = ()) -> RunConfig:
    """Return the configuration with the numbers of processes that are wanted, as far as the run can work with them.

    `config` is complete; `running` are the names of processes that go on from a previous supervisor and hold their
    ports. `SteeredProcesses` reports the other numbers with its first poll, and puts them back.
    """
    numbers = {} if config.is_control else state.numbers
    for role in (role for role in SCALED if role in numbers):
        with suppress(ConfigurationError):
            changed = with_numbers(config, {role: numbers[role]})
            added = range(counts(config).get(role, 0), counts(changed).get(role, 0))
            _check_ports(config, role, (n for n in added if process_name(role_of(role), n) not in running))
            config = changed
    return config


class SteeredProcesses:
    """The processes of a run whose numbers operators may change."""

    def __init__(
        self,
        config: RunConfig,
        running: RunConfig,
        path: Path,
        roles: ScaledRoles,
        ports: ServicePorts,
        *,
        scaler: GroupScaler | None,
        say: Callable[[str], None],
        put_back: Callable[[DesiredProcesses, int | None], None],
        answer: Callable[[str, float, str], None] = lambda _request, _time, _refused: None,
    ) -> None:
        """`config` is complete and was written to `path`; `running` is the result of `begin_with`, whose processes
        already run. `scaler`, if there is one, controls the grouping processes. `put_back` records the number of
        processes that the run keeps (None: as configured) in place of a request that it refuses.
        `answer` records the answer to the request of a key and time: why it is refused, or nothing."""
        self._config, self._path, self._scaler, self._say = config, path, scaler, say
        self._put_back, self._answer = put_back, answer
        self._configured = counts(config)
        self._seen: dict[str, DesiredProcesses] = {}
        self._evaluation: EvaluationRequest | None = None
        there = counts(running)
        self._numbered: dict[str, NumberedProcesses] = {
            name: NumberedProcesses(role_of(name), there.get(name, 0), roles, ports, self._spec_of(name))
            for name in (ENV, INFER, GATEWAY, EVAL)
        }
        if scaler is None:
            self._numbered[GROUP] = grouping_processes(running, path, roles, ports)

    def poll(self, state: DesiredState) -> None:
        """Follow the numbers that are wanted now. Call it often."""
        if state.processes != self._seen:
            before, self._seen = self._seen, dict(state.processes)
            roles = (*SCALED, *(name for name in {**before, **self._seen} if name.startswith(REPLICAS)))
            for role in roles:
                if (request := self._seen.get(role)) != before.get(role):
                    refused = self._follow(role, state.numbers)
                    if refused:
                        self._say(refused)
                    if request is not None:
                        self._reply(state, f"{PROCESSES}:{role}", request.wall_time, refused)
        if (evaluation := state.evaluation_request) is not None and evaluation != self._evaluation:
            self._evaluation = evaluation
            refused = "" if self._configured.get(EVAL) else "it has no evaluator; set evaluation.every_versions"
            self._reply(state, f"{EVALUATE}:{NOW}", evaluation.wall_time, refused)
        for numbered in self._numbered.values():
            numbered.poll()

    def _reply(self, state: DesiredState, request: str, wall_time: float, refused: str) -> None:
        before = state.answers.get(request)
        if before is not None and before.wall_time == wall_time:
            return  # an earlier supervisor has answered it
        try:
            self._answer(request, wall_time, refused)
        except RollstreamError as error:
            event(logger, "request_not_answered", level=logging.WARNING, request=request, error=str(error))

    def _follow(self, role: str, numbers: Mapping[str, int]) -> str:
        """Follow the number that is wanted of a role, or of the workers of an environment; return why not, or ""."""
        desired = numbers.get(role)
        if role == GROUP and self._scaler is not None:
            self._scaler.manual = None if desired is None else min(desired, self._config.topics.partitions)
            return ""
        if role.startswith(REPLICAS):
            return self._follow_replicas(role, desired, numbers)
        number = self._configured.get(role, 0) if desired is None else desired
        numbered = self._numbered[role]
        if role != ENV and not self._configured.get(role):
            return "" if desired is None else f"{role}={number} is not followed: this run has no role {role}"
        try:
            number = counts(with_numbers(self._config, {role: number})).get(role, 0)
            # A process that is still ending gives its port to its successor, which starts after it.
            added = [ordinal for ordinal in range(numbered.processes, number) if ordinal not in numbered.ending]
            _check_ports(self._config, role, added)
        except ConfigurationError as error:
            kept = numbered.processes
            self._keep(role, None if kept == self._configured.get(role, 0) else kept)
            return f"{role}={number} is not followed: {error}"
        if number != numbered.processes:
            self._say(f"{role} has {numbered.processes} processes and will have {number}")
        numbered.want(number)
        return ""

    def _follow_replicas(self, name: str, desired: int | None, numbers: Mapping[str, int]) -> str:
        """Check the number of workers that play an environment; they follow it by themselves."""
        workers, environment = self._numbered[ENV].processes, name.removeprefix(REPLICAS)
        if desired is None:
            return ""
        idle = [n for n in range(workers) if not played_by(self._config, n, numbers)]
        if environment not in {entry.name or entry.use for entry in self._config.mixture}:
            why = f"no entry of environments has the name {environment}"
        elif desired > workers:
            why = f"the run has {workers} workers; add some by `rollstream steer scale {ENV}={desired}` first"
        elif idle:
            why = f"worker {idle[0]} would have nothing to play"
        else:
            return ""
        self._keep(name, None)
        return f"{name}={desired} is not followed: {why}"

    def _keep(self, role: str, kept: int | None) -> None:
        """Put the number that is kept in place of the request of a role; nothing is on record without one."""
        if (refused := self._seen.get(role)) is None:
            return
        try:
            self._put_back(refused, kept)
        except RollstreamError as error:
            self._say(
                f"{role}={refused.processes} stays on record, and other processes may follow it: run `rollstream steer "
                f"scale {role}={'auto' if kept is None else kept}` ({error})"
            )

    def _spec_of(self, name: str) -> Callable[[int], RoleSpec]:
        return lambda ordinal: plans.process_spec(self._config, self._path, role_of(name), ordinal, expendable=True)


def _check_ports(config: RunConfig, role: str, ordinals: Iterable[int]) -> None:
    """Raise ConfigurationError if the port of a process to be added is in use."""
    if role not in (INFER, GATEWAY):
        return
    section, setting = (config.inference, "inference") if role == INFER else (config.gateway, "gateway")
    for ordinal in ordinals:
        if not is_free(section.host, section.port + ordinal):
            raise ConfigurationError(
                f"port {section.port + ordinal} of {section.host} is in use, and {role} {ordinal} would listen there: "
                f"free it, or set {setting}.port and start `rollstream run` again"
            )
