"""The data for every part of a chart: the settings of the run, its names in a cluster, and its processes."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import urlsplit

from rollstream.pipeline.config import RunConfig, secret_references
from rollstream.pipeline.deployment.access_rules import OPERATE
from rollstream.pipeline.deployment.container_settings import (
    COORDINATOR_PORT,
    ContainerSecrets,
    container_secrets,
    container_settings,
    variables_of,
)
from rollstream.pipeline.deployment.description import ARCHIVE, LEARN, PRUNE, RoleDescription, counts, role_of
from rollstream.pipeline.deployment.role_secrets import secrets_of
from rollstream.pipeline.settings import is_setting_variable, variable_of
from rollstream.topics.errors import ConfigurationError

_LONGEST_NAME = 30
"""Longest name of a run: pods' names, which begin with it, are host names and may have 63 characters."""
BOOTSTRAP, REPLICAS, IN_SYNC = (
    variable_of(key) for key in ("kafka.bootstrap_servers", "topics.replication_factor", "topics.min_insync_replicas")
)
COORDINATOR = variable_of("learner.coordinator")
TOOLS = "tools"
"""The pod in which operators run commands."""
PROCESSES = "team"
"""Name of the job within the JobSet of a learner with several processes. It is short, because JobSet refuses a job if
the longest name of its pods, which includes this name and a random suffix, has more than 63 characters."""


@dataclass(frozen=True, kw_only=True)
class ChartOptions:
    """Options of a chart in addition to the settings of the run; most can also be changed as values."""

    image: str = "rollstream:local"
    """Image of every role."""
    worker_image: str = ""
    """Image of the workers, if the environments' libraries are not in `image`."""
    config_text: str = ""
    """Text of the run's configuration file; empty if the run has none."""
    variables: Mapping[str, str] | None = None
    """Variables for settings that are not given in the file."""


@dataclass(frozen=True)
class RunChart:
    """A run, as its chart describes it."""

    config: RunConfig
    options: ChartOptions

    @cached_property
    def name(self) -> str:
        """Name of the run, spelled as Kubernetes allows."""
        name = re.sub("[^a-z0-9]+", "-", self.config.run.lower()).strip("-")
        if not name or name[0].isdigit() or len(name) > _LONGEST_NAME:
            raise ConfigurationError(
                f"run {self.config.run} would be named {name!r} in a cluster, where names must begin with a letter and "
                f"leave room for the names of pods: choose a name of {_LONGEST_NAME} characters at most"
            )
        return name

    @cached_property
    def processes(self) -> dict[str, int]:
        """Number of processes of each role, and of the tools that a chart can run in addition."""
        return {**counts(self.config), ARCHIVE: 1, PRUNE: 1}

    @cached_property
    def roles(self) -> tuple[RoleDescription, ...]:
        """Roles of the run, and the tools."""
        return tuple(role_of(name) for name in self.processes)

    @property
    def team(self) -> bool:
        """Whether the learner has several processes."""
        return self.processes.get(LEARN, 0) > 1

    @cached_property
    def secrets(self) -> ContainerSecrets:
        """Secrets that settings refer to."""
        return container_secrets(secret_references(self.config))[0]

    def secrets_of(self, role: str) -> ContainerSecrets:
        """Secrets of the pods of a role, or of another command; TOOLS have all of them."""
        if role == TOOLS:
            return self.secrets
        used = next((described.secrets for described in self.roles if described.name == role), ())
        return container_secrets(secrets_of(self.config, used))[0]

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
    def settings(self) -> dict[str, object]:
        """Settings of all pods in addition to the run's configuration file, whoever runs the brokers, by dotted key."""
        _secrets, references = container_secrets(secret_references(self.config))
        settings = {**container_settings(self.config, self.host), **references}
        for key, (_kind, name) in secrets_of(self.config).items():
            if name in self.connection_variables:
                settings[key] = f"env:{self.connection_variables[name]}"
        for key in ("kafka.bootstrap_servers", "learner.coordinator"):
            settings.pop(key, None)
        return settings

    @cached_property
    def variables(self) -> dict[str, str]:
        """Variables that all pods have."""
        given = {
            key: text for key, text in (self.options.variables or {}).items() if key not in (BOOTSTRAP, COORDINATOR)
        }
        return dict(sorted({**given, **variables_of(self.settings)}.items()))

    @cached_property
    def digest(self) -> str:
        """Digest of all settings; a change of it replaces the pods."""
        text = repr((self.options.config_text, self.variables))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def service_port(self) -> int:
        """Port of the probes and metrics of each pod."""
        port = self.settings["service.port"]
        assert isinstance(port, int)
        return port

    @property
    def ready_timeout_s(self) -> float:
        """Time after which a process of a pod gives up if it cannot become ready."""
        timeout_s = self.settings["supervisor.ready_timeout_s"]
        assert isinstance(timeout_s, float)
        return timeout_s

    @property
    def cluster(self) -> str:
        """Name of the brokers of the chart."""
        return f"{self.name}-kafka"

    @property
    def own_brokers(self) -> bool:
        """Whether the chart may run the brokers: settings for a secured connection mean that brokers already exist."""
        return self.config.kafka.client.get("security.protocol", "PLAINTEXT") == "PLAINTEXT"

    def object_name(self, role: str) -> str:
        """Return the name of the objects of a role, or of another part."""
        return f"{self.name}-{role}"

    def user(self, role: str) -> str:
        """Return the name of the user, on the brokers of the chart, of the pods of a role or of another command."""
        return self.object_name(OPERATE if role == TOOLS else role)

    def host(self, role: str, number: int) -> str:
        """Return the name of the host of a process."""
        return f"{self.object_name(role)}-{number}.{self.object_name(role)}"

    def coordinator(self, digest: str) -> str:
        """Return host and port of the first process of a multi-process learner whose JobSet has this digest."""
        name = self.object_name(LEARN)
        return f"{name}-{digest}-{PROCESSES}-0-0.{name}:{COORDINATOR_PORT}"

    def labels(self, role: str) -> dict[str, str]:
        """Return the labels by which the objects of a role are selected."""
        return {**self.run_labels, "app.kubernetes.io/component": role}

    @property
    def run_labels(self) -> dict[str, str]:
        """Labels by which all pods of the run are selected."""
        return {"app.kubernetes.io/name": "rollstream", "app.kubernetes.io/instance": self.name}

    def metadata(self, name: str, role: str) -> dict[str, object]:
        """Return name and labels of an object."""
        return {"name": name, "labels": {**self.labels(role), "app.kubernetes.io/managed-by": "Helm"}}


def values_key(role: str) -> str:
    """Return the name of a role among the values, without dashes, which templates would read as a minus."""
    first, *rest = role.split("-")
    return first + "".join(part.capitalize() for part in rest)


def port_of(url: str) -> int:
    """Return the port of a URL."""
    parts = urlsplit(url)
    return parts.port or (443 if parts.scheme == "https" else 80)
