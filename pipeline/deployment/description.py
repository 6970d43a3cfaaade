"""The description of a run: each role, its number of processes, and what a process needs, reads, writes and keeps.

`rollstream run`, deployments and docs/deploy.md#roles are derived from it. It imports no Kafka client and no JAX.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from rollstream.pipeline.command_line.commands import GROUPS
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.wire.catalogue import CATALOGUE, TOOLS

if TYPE_CHECKING:
    from rollstream.pipeline.config import RunConfig

LEARN = "learn"
INFER = "infer"
ENGINE = "engine"
SERVE_WEIGHTS = "serve-weights"
GROUP = "group"
FILL = "fill"
LABEL = "label"
ENV = "env"
GATEWAY = "gateway"
EVAL = "eval"
COLLECT = "collect"
SINK = "sink"
ARCHIVE = "archive"
PRUNE = "prune"

SERVICE_PORT_SETTING = "service.port"
"""Setting of the port at which every role answers /livez and /readyz; tools do not listen there."""
NUMBER = "ordinal"
"""Placeholder in templates for the number of the process."""
_TOKENS, _CONTROL = "tokens", "control"


@dataclass(frozen=True, kw_only=True)
class RoleDescription:
    """One role of a run: a kind of process, of which there may be several."""

    name: str
    """Its name: `rollstream role NAME` starts it, or `rollstream NAME` if it is a tool as well."""
    does: str
    """Its work, in one sentence without a subject."""
    flags: tuple[str, ...] = ()
    """Flags of the command that are not settings."""
    number_flag: str = ""
    """Flag for the number of the process, counted from 0; empty if there is only one process."""
    tasks: tuple[str, ...] = (_TOKENS,)
    """Kinds of runs that have the role: language models (tokens), control tasks (control), or both."""
    counted_by: str = ""
    """Setting that decides how many processes `rollstream run` starts; empty: none."""
    count: Callable[["RunConfig"], int] = lambda _config: 0
    """Returns the number of processes that `rollstream run` starts in a run that may have the role."""
    ports: tuple[str, ...] = ()
    """Settings of the ports, or of the URLs, at which it listens."""
    port_of_number: bool = False
    """Whether process N listens on its port plus N, so that several processes can share a machine."""
    extras: tuple[str, ...] = ()
    """Extras of the package that it requires."""
    groups: tuple[str, ...] = ()
    """Templates of the consumer groups to which it commits offsets, with settings and the number in braces."""
    transactional_ids: tuple[str, ...] = ()
    """Templates of the transactional ids under which it writes, with settings and the number in braces."""
    secrets: tuple[str, ...] = ()
    """Secret settings that it uses in addition to the secrets of its connection to Kafka; a name with a dot at the end
    stands for all settings of that section. It gets no other secrets."""
    keeps: str = ""
    """Setting of the directory whose files must survive a restart; empty: the log has everything."""
    finishes: bool = False
    """Whether it exits with 0 by itself when its work is done."""
    expendable: bool = False
    """Whether the run goes on without it, however often it fails."""
    after: tuple[str, ...] = ()
    """Roles that must be ready before it starts, if the run has them."""

    @property
    def numbered(self) -> bool:
        """Whether each process has a number that it must keep across restarts."""
        return bool(self.number_flag)

    @property
    def command(self) -> tuple[str, ...]:
        """Words that name its command."""
        return ("role", self.name) if self.name in GROUPS["role"] else (self.name,)

    @property
    def is_tool(self) -> bool:
        """Whether it is a long-running tool that `rollstream run` does not start."""
        return not self.counted_by

    @property
    def reads(self) -> tuple[str, ...]:
        """Topics that it reads, according to the catalogue."""
        names = {self.name, TOOLS} if self.is_tool else {self.name}
        return tuple(spec.name for spec in CATALOGUE if names & set(spec.readers))

    @property
    def writes(self) -> tuple[str, ...]:
        """Topics that it writes to, according to the catalogue."""
        return tuple(spec.name for spec in CATALOGUE if self.name in spec.writers)

    def arguments(self, number: int | str = 0) -> tuple[str, ...]:
        """Return the command of a process and its flags, without the flags of the configuration."""
        numbered = (self.number_flag, str(number)) if self.number_flag else ()
        return (*self.command, *self.flags, *numbered)


_CONSUMERS = (LEARN, INFER, ENGINE, SERVE_WEIGHTS, GROUP, LABEL)
"""Roles that must be ready before a rollout is produced."""

ROLES: tuple[RoleDescription, ...] = (
    # First, so that it stops last: the learner may record a step until it has stopped.
    RoleDescription(
        name=SINK,
        does="fills a tracker, such as trackio, with the steps of the learner",
        flags=("--follow",),
        counted_by="tracker.to",
        count=lambda config: int(bool(config.tracker.to)),
        extras=("sinks",),
        secrets=("tracker.options.",),
        keeps="tracker.directory",
        expendable=True,
    ),
    RoleDescription(
        name=LEARN,
        does="trains on the batches and publishes policy versions",
        number_flag="--process",
        counted_by="learner.processes",
        count=lambda config: config.learner.processes,
        extras=("learner",),
        # It loads the environments, because a row must hold their longest rollouts.
        secrets=("environments.",),
        groups=("{run}.learner.turn-publisher", "{run}.samples.turn-writers"),
        transactional_ids=("{run}/learner", "{run}/samples/{ordinal}"),
        keeps="learner.checkpoint.directory",
        finishes=True,
    ),
    RoleDescription(
        name=INFER,
        does="serves completions with the newest policy version",
        number_flag="--ordinal",
        counted_by="inference.replicas",
        count=lambda config: config.inference.replicas,
        ports=("inference.port",),
        port_of_number=True,
        secrets=("inference.api_key",),
        extras=("learner",),
    ),
    RoleDescription(
        name=ENGINE,
        does="runs vLLM in another Python with the newest policy version",
        counted_by="serving.python",
        count=lambda config: int(bool(config.serving.python)),
        ports=("serving.urls",),
        secrets=("serving.api_key",),
    ),
    RoleDescription(
        name=SERVE_WEIGHTS,
        does="keeps engines such as vLLM and SGLang on the newest policy version",
        counted_by="serving.urls",
        count=lambda config: int(bool(config.serving.urls)),
        secrets=("serving.api_key",),
    ),
    RoleDescription(
        name=GROUP,
        does="groups rollouts into training batches, exactly once",
        number_flag="--ordinal",
        counted_by="grouper.processes",
        count=lambda config: config.grouper.processes,
        groups=("{run}.{grouper.group}", "{run}.{grouper.group}.turn-{ordinal}"),
        transactional_ids=("{run}/grouper/{ordinal}",),
        secrets=("grouper.signing_key",),
    ),
    RoleDescription(
        name=FILL,
        does="fills a trajectory buffer on disk from the log",
        tasks=(_CONTROL,),
        counted_by="fill.directory",
        count=lambda config: int(bool(config.fill.directory)),
        groups=("{run}.filler-{fill.name}",),
        keeps="fill.directory",
    ),
    RoleDescription(
        name=LABEL,
        does="labels trajectories and rollouts that wait for a reward, exactly once",
        number_flag="--ordinal",
        tasks=(_TOKENS, _CONTROL),
        counted_by="labeling.processes",
        count=lambda config: config.labelers,
        groups=("{run}.{labeling.group}", "{run}.{labeling.group}.turn-{ordinal}"),
        transactional_ids=("{run}/labeller/{ordinal}", "{run}/labeller/bootstrap"),
        secrets=("kafka.signing_key", "labeling.judge.api_key"),
    ),
    RoleDescription(
        name=ENV,
        does="plays the environments and publishes rollouts",
        number_flag="--ordinal",
        counted_by="supervisor.workers",
        count=lambda config: config.supervisor.workers,
        secrets=("environments.", "kafka.signing_key", "worker.api_key"),
        after=_CONSUMERS,
    ),
    RoleDescription(
        name=GATEWAY,
        does="captures the model calls of any agent and writes them as rollouts",
        number_flag="--ordinal",
        counted_by="gateway.port",
        count=lambda config: config.gateway.processes if config.gateway.port else 0,
        ports=("gateway.port",),
        secrets=("gateway.api_key", "kafka.signing_key", "worker.api_key"),
        after=_CONSUMERS,
    ),
    RoleDescription(
        name=EVAL,
        does="evaluates the held-out split at every K-th policy version",
        number_flag="--ordinal",
        counted_by="evaluation.every_versions",
        count=lambda config: config.evaluation.processes if config.evaluation.every_versions else 0,
        secrets=("environments.", "worker.api_key"),
        after=_CONSUMERS,
    ),
    RoleDescription(
        name=COLLECT,
        does="plays a control task and publishes trajectories",
        number_flag="--ordinal",
        tasks=(_CONTROL,),
        counted_by="collect.processes",
        count=lambda config: config.collect.processes,
        secrets=("collect.options.",),
        finishes=True,
        after=(FILL, LABEL),
    ),
    RoleDescription(
        name=ARCHIVE,
        does="copies new records of the run's topics into Parquet files, each once",
        flags=("--follow",),
        tasks=(_TOKENS, _CONTROL),
        groups=("{run}.archive",),
        keeps="data_dir",
    ),
    RoleDescription(
        name=PRUNE,
        does="deletes records that recovery, verification and learners no longer need; runs at intervals",
        flags=("--yes",),
        tasks=(_TOKENS, _CONTROL),
        finishes=True,
    ),
)
"""Every role, in the order in which `rollstream run` starts them."""
_BY_NAME = {role.name: role for role in ROLES}


def role_of(name: str) -> RoleDescription:
    """Return the description of a role. Raises ConfigurationError for an unknown name."""
    if name not in _BY_NAME:
        raise ConfigurationError(f"no role is named {name!r}; roles are {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


def counts(config: "RunConfig") -> dict[str, int]:
    """Return the number of processes that `rollstream run` starts for each role of the run."""
    task = _CONTROL if config.is_control else _TOKENS
    numbers = {role.name: role.count(config) for role in ROLES if task in role.tasks}
    return {name: number for name, number in numbers.items() if number}


_FIRST_HAS_NO_NUMBER = (LEARN, INFER, GATEWAY, EVAL)


def process_name(role: RoleDescription, number: int) -> str:
    """Return the name of a process of a role, e.g. group-0; for some roles the first process is named like the role."""
    bare = not role.numbered or (number == 0 and role.name in _FIRST_HAS_NO_NUMBER)
    return role.name if bare else f"{role.name}-{number}"


_NAMED = re.compile(r"\{([a-z_.]+)\}")


def expanded(template: str, config: "RunConfig", number: int = 0) -> str:
    """Expand a template of `groups` or `transactional_ids` for the process with this number."""

    def value(match: re.Match[str]) -> str:
        return str(number if match[1] == NUMBER else attrgetter(match[1])(config))

    return _NAMED.sub(value, template)
