"""The Helm chart of a run: the chart in infra/chart, and among its values the run, described from its settings.

The templates know how a process runs in a cluster; everything that differs between runs is a value below `run`.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rollstream.consumers.learner.checkpoint_paths import is_remote
from rollstream.infra import config as infra_config
from rollstream.infra.config import COMMON, BrokerConfig, replication
from rollstream.infra.monitoring.alerts import alert_rules
from rollstream.infra.monitoring.dashboard import dashboard
from rollstream.pipeline.command_line.process_number import AUTO
from rollstream.pipeline.config import RunConfig, secret_references
from rollstream.pipeline.deployment.access_rules import OPERATE, TOPICS, access_rules, users_of
from rollstream.pipeline.deployment.container_settings import (
    ContainerSecrets,
    check_broker_secrets,
    check_brokers,
    check_containers,
    container_secrets,
    container_settings,
    is_secured,
    secrets_of,
    variables_of,
)
from rollstream.pipeline.deployment.description import (
    ARCHIVE,
    ENV,
    EVAL,
    GATEWAY,
    GROUP,
    INFER,
    LABEL,
    LEARN,
    PRUNE,
    SERVE_WEIGHTS,
    RoleDescription,
    counts,
    role_of,
)
from rollstream.pipeline.deployment.scaling import bounds, lag_query
from rollstream.pipeline.deployment.yaml_text import render_yaml
from rollstream.pipeline.settings import is_setting_variable, variable_of
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.wire.catalogue import CATALOGUE, topic_name

CHART = Path(infra_config.__file__).with_name("chart")
MARK = "{{- /* Written by `rollstream deploy chart`"
"""Beginning of each template of the chart."""
TOOLS = "tools"
"""The pod in which operators run commands."""
_NO_RUN = "\nrun: {}\n"
_LONGEST_NAME = 30
"""Longest name of a run: pods' names, which begin with it, are host names and may have 63 characters."""
_LARGEST_FILE = 900_000
"""Most bytes of the run's file, which is in a ConfigMap of at most 1 MiB in all."""
_CALLERS = (ENV, EVAL, GATEWAY)
"""Roles that call the inference servers."""
_SCALED = (GROUP, LABEL, ENV)
"""Roles whose number of processes is a value of the chart; for other roles, settings depend on it, so it is fixed."""
_TRACED = (ENV, GATEWAY, GROUP, LEARN, INFER)
"""Roles that make spans."""
_OF_VALUES = tuple(map(variable_of, ("kafka.bootstrap_servers", "learner.coordinator")))
"""Variables that the templates set."""
_BROKER_SETTINGS = (
    "auto.create.topics.enable",
    "offsets.retention.minutes",
    "group.min.session.timeout.ms",
    "group.consumer.min.session.timeout.ms",
    "group.consumer.min.heartbeat.interval.ms",
    "group.consumer.session.timeout.ms",
    "group.consumer.heartbeat.interval.ms",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms",
    "log.cleaner.backoff.ms",
    "message.max.bytes",
    "replica.fetch.max.bytes",
    "socket.request.max.bytes",
)
"""Settings of our local brokers that the roles rely on; all other settings of local brokers only suit a laptop."""


@dataclass(frozen=True, kw_only=True)
class ChartOptions:
    """Options of a chart in addition to the settings of the run."""

    image: str = "rollstream:local"
    """Image of every role."""
    worker_image: str = ""
    """Image of the workers, if the environments' libraries are not in `image`."""
    config_text: str = ""
    """Text of the run's configuration file; empty if the run has none."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables for settings that are not given in the file."""


def chart_files(config: RunConfig, options: ChartOptions) -> dict[str, str]:
    """Return the text of each file of a run's chart, by its path.

    Raises ConfigurationError for a run whose roles cannot run in a cluster.
    """
    _check(config, options)
    files = {str(path.relative_to(CHART)): path.read_text("utf-8") for path in CHART.rglob("*") if path.is_file()}
    run = _Run(config, options).values()
    # Without it, `helm upgrade --reuse-values` would silently keep the run of the chart before.
    digest = hashlib.sha256(render_yaml(run).encode()).hexdigest()[:12]
    described = render_yaml({"run": {"digest": digest, **run}})
    return {
        **files,
        "values.yaml": files["values.yaml"].replace(_NO_RUN, f"\n{described}"),
        "files/run.digest": f"{digest}\n",
        "files/rollstream-dashboard.json": dashboard(),
        "files/rollstream-alerts.json": alert_rules(),
    }


def cluster_name(config: RunConfig) -> str:
    """Return the name of a run, spelled as Kubernetes allows; names of objects begin with it."""
    name = re.sub("[^a-z0-9]+", "-", config.run.lower()).strip("-")
    if not name or name[0].isdigit() or len(name) > _LONGEST_NAME:
        raise ConfigurationError(
            f"run {config.run} would be named {name!r} in a cluster, where names must begin with a letter and "
            f"leave room for the names of pods: choose a name of {_LONGEST_NAME} characters at most"
        )
    return name


@dataclass(frozen=True)
class _Run:
    """A run, as it is described to the templates."""

    config: RunConfig
    options: ChartOptions

    def values(self) -> dict[str, Any]:
        """Return the values below `run`."""
        config, options = self.config, self.options
        secured = is_secured(config)
        rule = config.grouper.autoscale
        least, most = bounds(rule, config.topics.partitions)
        return {
            "id": config.run,
            "name": self.name,
            "image": options.image,
            "file": options.config_text,
            "variables": self.variables,
            "ownBrokers": not secured,
            "bootstrapServers": config.kafka.bootstrap_servers if secured else "",
            "servicePort": self.settings["service.port"],
            "readyTimeoutSeconds": math.ceil(self.settings["supervisor.ready_timeout_s"]),
            "stopTimeoutSeconds": math.ceil(config.supervisor.stop_timeout_s),
            "scaling": {
                "query": lag_query(config.run),
                "minReplicas": least,
                "maxReplicas": most,
                "lagPerReplica": str(rule.lag_per_process),
                "cooldownSeconds": math.ceil(rule.cooldown_s),
            },
            "pods": self._pods(),
            "kafka": self._kafka(),
        }

    @cached_property
    def name(self) -> str:
        return cluster_name(self.config)

    @cached_property
    def processes(self) -> dict[str, int]:
        """Number of processes of each role, and of the tools that a chart can run in addition."""
        return {**counts(self.config), ARCHIVE: 1, PRUNE: 1}

    @cached_property
    def connection_variables(self) -> dict[str, str]:
        """Variables of pods, by their keys in the Secret, for secrets of the connection that are given by variables.

        Kubernetes prefers a pod's own variables to those of the Secrets that it names. Under its own name, the run's
        password would therefore override that of a role's own user. So the setting refers to it under another name.
        """
        return {
            name: f"SECRET_{name}"
            for kind, name in secrets_of(self.config).values()
            if kind == "env" and is_setting_variable(RunConfig, name)
        }

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Settings of all pods in addition to the run's configuration file, by dotted key."""
        _secrets, references = container_secrets(secret_references(self.config))
        settings = {**container_settings(self.config, self._host), **references}
        for key, (_kind, name) in secrets_of(self.config).items():
            if name in self.connection_variables:
                settings[key] = f"env:{self.connection_variables[name]}"
        return settings

    @property
    def variables(self) -> dict[str, str]:
        """Variables that all pods have."""
        every = {**self.options.variables, **variables_of(self.settings)}
        return {name: text for name, text in sorted(every.items()) if name not in _OF_VALUES}

    def _host(self, role: str, number: int) -> str:
        return f"{self.name}-{role}-{number}.{self.name}-{role}"

    def _pods(self) -> dict[str, Any]:
        everything, _settings = container_secrets(secret_references(self.config))
        connection, _settings = container_secrets(secrets_of(self.config))
        apply = ("topics", "apply", "--wait", "600")  # After this time without brokers it is started again.
        return {
            TOPICS: {"does": "creates missing topics", "kind": "Job", "args": apply, **self._secrets(connection)},
            **{name: self._pod(role_of(name), count) for name, count in self.processes.items()},
            TOOLS: {"kind": "CronJob", "user": OPERATE, **self._secrets(everything)},
        }

    def _pod(self, role: RoleDescription, count: int) -> dict[str, Any]:
        name = role.name
        team = name == LEARN and count > 1
        pod: dict[str, Any] = {
            "does": role.does,
            "kind": "JobSet" if team else "Job" if role.finishes else "StatefulSet",
            "args": role.arguments(AUTO),
            "replicas": count,
            **self._secrets(container_secrets(secrets_of(self.config, role.secrets))[0]),
        }
        if name == PRUNE:
            return pod | {"kind": "CronJob"}
        pod |= {"service": True, "probes": not role.is_tool}
        if name == ENV:
            pod |= {"image": self.options.worker_image, "most": count}  # Flow control relies on the number of workers.
        elif name in _SCALED:
            pod["most"] = self.config.topics.partitions
        if self._keeps_files(role):
            # The processes of a learner, on any node, write one checkpoint; engines read those of serve-weights.
            pod["accessMode"] = "ReadWriteMany" if team or name == SERVE_WEIGHTS else "ReadWriteOnce"
        return pod | self._connections(role)

    def _connections(self, role: RoleDescription) -> dict[str, Any]:
        """Return the roles that a role waits for or calls, the first and last port at which its processes serve, and
        the ports of servers outside the run."""
        config, serves = self.config, INFER in self.processes
        connections: dict[str, Any] = {"after": [name for name in role.after if name in self.processes]}
        if role.name == INFER:
            first = self.settings["inference.port"]
            connections["http"] = [first, first + self.processes[INFER] - 1]
        if role.name == GATEWAY:
            connections["http"] = [config.gateway.port, config.gateway.port]
        urls: list[str] = []
        if role.name in _CALLERS and serves:
            connections["calls"] = [INFER]
        elif role.name in _CALLERS:
            urls += config.worker.inference_urls
        if role.name == SERVE_WEIGHTS:
            urls += config.serving.urls
        if role.name == LABEL:
            urls.append(config.labeling.judge.url)
        if role.name in _TRACED:
            urls.append(config.traces.endpoint)
        if ports := sorted({_port_of(url) for url in urls if url}):
            connections["outside"] = ports
        return connections

    def _keeps_files(self, role: RoleDescription) -> bool:
        """Whether a role keeps files that must survive its pod."""
        if role.name == LEARN:
            return not is_remote(self.config.learner.checkpoint.directory)
        if role.name == SERVE_WEIGHTS:
            # Engines read checkpoints there, except our vLLM plug-in, which writes its own.
            return self.config.serving.engine != "vllm-plugin"
        return bool(role.keeps)

    def _secrets(self, secrets: ContainerSecrets) -> dict[str, Any]:
        """Return the keys of the Secret, by the variables that get them, and those that are mounted as files."""
        variables = {self.connection_variables.get(name, name): name for name in secrets.variables}
        entries: dict[str, Any] = {"secretVariables": variables, "secretFiles": list(secrets.files)}
        return {key: value for key, value in entries.items() if value}

    def _kafka(self) -> dict[str, Any]:
        """Return what the release needs to run brokers, and the port of a registry that already exists."""
        config = self.config
        registry = config.kafka.registry.url
        return {
            "version": BrokerConfig().image.rpartition(":")[2],
            "registryPort": _port_of(registry) if registry else 0,
            "replication": replication("replicas", "inSync"),
            "config": {**{key: COMMON[key] for key in _BROKER_SETTINGS}, **config.broker.properties},
            "topics": [
                {
                    "name": spec.name,
                    "topic": topic_name(config.run, spec.name),
                    "partitions": spec.partition_count(config.topics),
                    "config": spec.settings(config.topics, config.kafka),
                }
                for spec in CATALOGUE
            ],
            "users": {user: self._acls(user) for user in users_of(config)},
        }

    def _acls(self, user: str) -> list[dict[str, Any]]:
        """Return the access rules of a user; those that differ only in their names are one."""
        named: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
        for rule in access_rules(self.config, user):
            pattern = "prefix" if rule.prefix else "literal"
            named.setdefault((rule.resource, pattern, rule.operations), []).append(rule.name)
        return [
            {"type": kind, "patternType": pattern, "operations": operations, "names": names}
            for (kind, pattern, operations), names in named.items()
        ]


def _port_of(url: str) -> int:
    parts = urlsplit(url)
    return parts.port or (443 if parts.scheme == "https" else 80)


def _check(config: RunConfig, options: ChartOptions) -> None:
    check_containers(config)
    if is_secured(config):
        check_brokers(config)
    else:
        check_broker_secrets(config)
    if config.learner.weights.url and "://" not in config.learner.weights.url:
        raise ConfigurationError(
            f"learner.weights.url is {config.learner.weights.url}, and pods share no directory; name a URL of a store, "
            "such as s3://bucket/weights, or remove the setting, so that weights are sent through the log"
        )
    if len(options.config_text.encode()) > _LARGEST_FILE:
        raise ConfigurationError(
            f"the run's configuration file is larger than {_LARGEST_FILE} bytes, and a ConfigMap may have 1 MiB"
        )
