"""Pods of a chart: a role in an unprivileged container, with its settings, its user on the brokers and its probes."""

import math
from collections.abc import Sequence
from typing import Any

from rollstream.pipeline.deployment.chart.context import COORDINATOR, TOOLS, RunChart, values_key
from rollstream.pipeline.deployment.chart.templates import Enclosed, Raw, digest_of, each_of, value, when
from rollstream.pipeline.deployment.container_settings import HOME, SECRETS
from rollstream.pipeline.deployment.description import ENV, GATEWAY, LEARN, RoleDescription
from rollstream.pipeline.settings import variable_of

CONFIG_FOLDER = "/etc/rollstream"
CONFIG = f"{CONFIG_FOLDER}/run.toml"
CA_FOLDER = "/etc/kafka-ca"
USER = 1000
_LOOK_S, _LOOK_AT_START_S = 15, 5
_STOPPING_S = 10
"""Time, in addition to supervisor.stop_timeout_s, until a pod is killed."""
IN_CHART, WITH_USERS = ".Values.brokers.enabled", "and .Values.brokers.enabled .Values.brokers.security"
BROKER_VALUES = ("brokers.enabled", "brokers.security", "brokers.bootstrapServers")
POD_VALUES = (
    "image",
    "imagePullPolicy",
    "imagePullSecrets",
    "workingDir",
    "extraEnvFrom",
    "extraVolumes",
    "extraVolumeMounts",
    "wait.resources",
    *BROKER_VALUES,
    "secretName",
)
"""Values that every pod depends on."""
_IDLE = (
    "python",
    "-c",
    "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit()); signal.pause()",
)
"""Command of a container that waits for `kubectl exec`. The first process of a container gets only signals for which it
has a handler."""
_CONFINED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def pod_template(
    chart: RunChart,
    role: str,
    args: Sequence[str],
    *,
    volume: str = "",
    waits: Sequence[str] = (),
    described: RoleDescription | None = None,
    restart: str = "",
    subdomain: str = "",
) -> dict[str, Any]:
    """Return the template of the pods of a role, or of another command.

    `volume` is the claim for the files that the role keeps, and `waits` are the arguments of `rollstream deploy wait`,
    which runs before the role starts.
    """
    path = f"roles.{values_key(role)}"
    container = _container(chart, role, "rollstream", args, f"{path}.resources")
    if described is not None and not described.is_tool:
        container |= _probes(chart, described)
    if role == TOOLS:
        container |= {"command": list(_IDLE), "args": []}
    spec: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": math.ceil(chart.config.supervisor.stop_timeout_s) + _STOPPING_S,
        "imagePullSecrets": value("imagePullSecrets"),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "nodeSelector": value(f"{path}.nodeSelector"),
        "tolerations": value(f"{path}.tolerations"),
        "affinity": value(f"{path}.affinity"),
    }
    if restart:
        spec["restartPolicy"] = restart
    if subdomain:
        spec["subdomain"] = subdomain
    if waits:
        spec["initContainers"] = [_container(chart, role, "wait", ("deploy", "wait", *waits), "wait.resources")]
    spec |= {"containers": [container], "volumes": _volumes(chart, role, volume)}
    annotations = {"rollstream/settings": Raw(f'"{digest_of(chart.digest, BROKER_VALUES)}"')}
    return {"metadata": {"labels": chart.labels(role), "annotations": annotations}, "spec": spec}


def config_flag(chart: RunChart) -> tuple[str, ...]:
    """Return the flag that names the run's configuration file, if the run has one."""
    return ("--config", CONFIG) if chart.options.config_text else ()


def _container(chart: RunChart, role: str, name: str, args: Sequence[str], resources: str) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": name,
        "image": value(f"roles.{values_key(role)}.image", "image"),
        "imagePullPolicy": value("imagePullPolicy"),
        "command": ["rollstream"],
        "args": [*args, *config_flag(chart)],
        "workingDir": value("workingDir"),
        "envFrom": [
            {"configMapRef": {"name": chart.object_name("settings")}},
            each_of("extraEnvFrom"),
            each_of(f"roles.{values_key(role)}.extraEnvFrom"),
        ],
    }
    if variables := _variables(chart, role):
        container["env"] = variables
    return container | {
        "resources": value(resources),
        "securityContext": _CONFINED,
        "volumeMounts": _mounts(chart, role),
    }


def _variables(chart: RunChart, role: str) -> list[Any] | Enclosed:
    """Return the variables that only a role's pods have: secrets, its user, and the address of the first learner
    process."""
    variables: list[Any] = [
        {
            "name": chart.connection_variables.get(name, name),
            "valueFrom": {"secretKeyRef": {"name": value("secretName"), "key": name}},
        }
        for name in chart.secrets_of(role).variables
    ]
    if role == LEARN and chart.team:
        variables.append({"name": COORDINATOR, "value": chart.coordinator(learner_digest(chart))})
    if chart.own_brokers:
        user = chart.user(role)
        password = {"secretKeyRef": {"name": user, "key": "password"}}
        name, secret = (variable_of(f"kafka.client.sasl_{key}") for key in ("username", "password"))
        of_user = when(WITH_USERS, [{"name": name, "value": user}, {"name": secret, "valueFrom": password}])
        if not variables:
            return of_user  # A list with only a conditional part would be null in YAML if the part is left out.
        variables.append(of_user)
    return variables


def learner_digest(chart: RunChart) -> str:
    """Return the digest in the name of the learner's job, so that a change of settings makes a new job."""
    return digest_of(chart.digest, (*pod_values(chart), f"roles.{values_key(LEARN)}"))


def pod_values(chart: RunChart) -> tuple[str, ...]:
    """Return the values that every pod depends on."""
    return POD_VALUES if has_secrets(chart) else POD_VALUES[:-1]


def has_secrets(chart: RunChart) -> bool:
    """Whether settings refer to secrets, so that the chart needs the name of a Secret."""
    return bool(chart.secrets.variables or chart.secrets.files)


def _mounts(chart: RunChart, role: str) -> list[Any]:
    mounts: list[Any] = [{"name": "files", "mountPath": str(HOME)}, {"name": "tmp", "mountPath": "/tmp"}]
    if chart.options.config_text:
        mounts.append({"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True})
    if chart.secrets_of(role).files:
        mounts.append({"name": "secrets", "mountPath": str(SECRETS), "readOnly": True})
    if chart.own_brokers:
        mounts.append(when(WITH_USERS, [{"name": "kafka-ca", "mountPath": CA_FOLDER, "readOnly": True}]))
    return [*mounts, each_of("extraVolumeMounts")]


def _volumes(chart: RunChart, role: str, volume: str) -> list[dict[str, Any] | Enclosed]:
    files: dict[str, Any] = {"persistentVolumeClaim": {"claimName": volume}} if volume else {"emptyDir": {}}
    volumes: list[dict[str, Any] | Enclosed] = [{"name": "files", **files}, {"name": "tmp", "emptyDir": {}}]
    if chart.options.config_text:
        volumes.append({"name": "config", "configMap": {"name": chart.object_name("config")}})
    if files_of_role := chart.secrets_of(role).files:
        items = [{"key": name, "path": name} for name in files_of_role]
        volumes.append({"name": "secrets", "secret": {"secretName": value("secretName"), "items": items}})
    if chart.own_brokers:
        # Strimzi's own authority; its private key is in another Secret.
        authority = {"secretName": f"{chart.cluster}-cluster-ca-cert", "items": [{"key": "ca.crt", "path": "ca.crt"}]}
        volumes.append(when(WITH_USERS, [{"name": "kafka-ca", "secret": authority}]))
    return [*volumes, each_of("extraVolumes")]


def _probes(chart: RunChart, role: RoleDescription) -> dict[str, Any]:
    ports = [{"name": "service", "containerPort": chart.service_port}]
    if role.name == GATEWAY:
        ports.append({"name": "http", "containerPort": chart.config.gateway.port})
    alive, ready = ({"httpGet": {"path": path, "port": "service"}} for path in ("/livez", "/readyz"))
    often = {"periodSeconds": _LOOK_S, "timeoutSeconds": 10}
    # Twice the time after which a process gives up by itself, so that its own error ends it first.
    failures = math.ceil(2 * chart.ready_timeout_s / _LOOK_AT_START_S)
    return {
        "ports": ports,
        "startupProbe": {
            **ready,
            "periodSeconds": _LOOK_AT_START_S,
            "timeoutSeconds": 10,
            "failureThreshold": failures,
        },
        "livenessProbe": {**alive, **often, "failureThreshold": 4},
        "readinessProbe": {**ready, **often, "failureThreshold": 2},
    }


CALLERS = (ENV, "eval", GATEWAY)
"""Roles that call the inference servers."""
