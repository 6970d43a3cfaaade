"""Values of a chart: their defaults, their bounds, and the values that differ in development and in production.

Settings of the run are not among them: they decide what the log means; change them in the configuration file.
"""

import math
from collections.abc import Mapping
from typing import Any

from rollstream.pipeline.deployment.access_rules import TOPICS
from rollstream.pipeline.deployment.chart.brokers import kafka_version
from rollstream.pipeline.deployment.chart.context import TOOLS, RunChart, values_key
from rollstream.pipeline.deployment.chart.pods import has_secrets
from rollstream.pipeline.deployment.chart.workloads import SCALED, keeps_files
from rollstream.pipeline.deployment.container_settings import HOME
from rollstream.pipeline.deployment.description import (
    ARCHIVE,
    ENV,
    FILL,
    GROUP,
    INFER,
    LEARN,
    PRUNE,
    SERVE_WEIGHTS,
    SINK,
)
from rollstream.pipeline.deployment.scaling import bounds

Values = dict[str, Any]
_SIZES = {LEARN: "100Gi", FILL: "100Gi", ARCHIVE: "500Gi", SERVE_WEIGHTS: "100Gi", SINK: "10Gi"}
_MEMORY = {LEARN: "16Gi", INFER: "8Gi", GROUP: "2Gi"}
_CPU = {LEARN: "4", INFER: "2"}
_SCHEDULE = "17 3 * * *"
_CRON = r"^(@(yearly|annually|monthly|weekly|daily|midnight|hourly)|@every \S+|(\S+\s+){4}\S+)$"
"""Schedules that Kubernetes accepts have five fields or one of these names; it checks the fields itself."""


def values(chart: RunChart) -> Values:
    """Return the defaults, which suit any cluster with Strimzi: three secured brokers."""
    own, rule = chart.own_brokers, chart.config.grouper.autoscale
    least, most = bounds(rule, chart.config.topics.partitions)
    table: Values = {
        "image": chart.options.image,
        "imagePullPolicy": "IfNotPresent",
        "imagePullSecrets": [],
        "workingDir": str(HOME),
        "extraEnvFrom": [],
        "extraVolumes": [],
        "extraVolumeMounts": [],
    }
    if has_secrets(chart):
        table["secretName"] = chart.object_name("secrets")
    return table | {
        "brokers": {
            "enabled": own,
            "bootstrapServers": "" if own else chart.config.kafka.bootstrap_servers,
            "version": kafka_version(),
            "security": True,
            "count": 3,
            "replicationFactor": 3,
            "minInSyncReplicas": 2,
            "storage": {"size": "100Gi", "storageClassName": ""},
            "resources": _resources("2", "4Gi"),
        },
        "roles": {values_key(name): _role(chart, name) for name in (*chart.processes, TOPICS, TOOLS)},
        "wait": {"resources": _resources("100m", "512Mi")},
        "storage": {
            values_key(role.name): _storage(chart, role.name) for role in chart.roles if keeps_files(chart, role)
        },
        "disruptionBudgets": {"enabled": True, "protectJobs": False},
        "networkPolicies": {
            "enabled": True,
            "monitoringNamespace": "monitoring",
            "agents": [{"podSelector": {}}],
            "egress": [],
        },
        "monitoring": {"podMonitor": False, "rules": False, "dashboard": False, "labels": {}},
        "autoscaling": {
            "enabled": False,
            "prometheus": "http://prometheus-operated.monitoring:9090",
            "minReplicas": least,
            "maxReplicas": most,
            "lagPerReplica": str(rule.lag_per_process),
            "cooldownSeconds": math.ceil(rule.cooldown_s),
        },
    }


def development(chart: RunChart) -> Values:
    """Return the values that differ on a local cluster: one broker, plaintext, no policies, small pods."""
    small = {"resources": _resources("100m", "512Mi")}
    return {
        "brokers": {
            "security": False,
            "count": 1,
            "replicationFactor": 1,
            "minInSyncReplicas": 1,
            "storage": {"size": "5Gi"},
            "resources": _resources("200m", "1Gi"),
        },
        "roles": {
            values_key(name): {**small, **({"enabled": False} if name == ARCHIVE else {})} for name in chart.processes
        },
        "storage": {key: {"size": "5Gi"} for key in values(chart)["storage"]},
        "disruptionBudgets": {"enabled": False},
        "networkPolicies": {"enabled": False},
    }


def production(chart: RunChart) -> Values:
    """Return the values that differ where Prometheus' operator and KEDA are installed: alerts, scaling, pruning."""
    return {
        "roles": {PRUNE: {"enabled": True}},
        "disruptionBudgets": {"enabled": True, "protectJobs": True},
        "networkPolicies": {"enabled": True},
        "monitoring": {"podMonitor": True, "rules": True, "dashboard": True},
        **({"autoscaling": {"enabled": True}} if GROUP in chart.processes else {}),
    }


def schema(chart: RunChart) -> dict[str, Any]:
    """Return the schema of the values. It rejects unknown values, and bounds values as the settings require."""
    tree = values(chart)
    described = _schema_of(tree)
    known = described["properties"]
    for name in SCALED:
        if name in chart.processes:
            known["roles"]["properties"][values_key(name)]["properties"]["replicas"] = _replicas(chart, name)
    known["imagePullPolicy"] = {"enum": ["Always", "IfNotPresent", "Never"]}
    its = known["brokers"]["properties"]
    its["count"] = its["replicationFactor"] = its["minInSyncReplicas"] = {"type": "integer", "minimum": 1}
    if not chart.own_brokers:
        its["enabled"] = {"const": False, "description": "The run's settings name secured brokers that already exist."}
    known["brokers"]["if"] = {"properties": {"enabled": {"const": False}}}
    known["brokers"]["then"] = {"properties": {"bootstrapServers": {"minLength": 1}}}
    scaling = known["autoscaling"]["properties"]
    partitions = chart.config.topics.partitions
    # Without a process nothing reports the lag; a process without a partition has nothing to do.
    scaling["minReplicas"] = scaling["maxReplicas"] = {"type": "integer", "minimum": 1, "maximum": partitions}
    scaling["lagPerReplica"] = {"type": "string", "pattern": "^[1-9][0-9]*$"}
    if GROUP not in chart.processes:
        scaling["enabled"] = {"const": False}
    for role in known["roles"]["properties"].values():
        if "schedule" in role["properties"]:
            role["properties"]["schedule"] = {"type": "string", "pattern": _CRON}
    known["global"] = {"type": "object"}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": f"Values of run {chart.config.run}",
    } | described


def _role(chart: RunChart, name: str) -> Values:
    role: Values = {}
    if name in SCALED:
        role["replicas"] = chart.processes[name]
    if name == TOOLS:
        role["replicas"] = 0  # The pod has all secrets and may change the run, so it runs only while it is needed.
    if name in (ARCHIVE, PRUNE):
        role["enabled"] = name == ARCHIVE
    if name == PRUNE:
        role["schedule"] = _SCHEDULE
    return role | {
        "image": chart.options.worker_image if name == ENV else "",
        "resources": _resources(_CPU.get(name, "500m"), _MEMORY.get(name, "1Gi")),
        "nodeSelector": {},
        "tolerations": [],
        "affinity": {},
        "extraEnvFrom": [],
    }


def _storage(chart: RunChart, name: str) -> Values:
    # The processes of a learner, on any node, write one checkpoint; engines read the checkpoints of serve-weights.
    shared = name == SERVE_WEIGHTS or (name == LEARN and chart.team)
    mode = "ReadWriteMany" if shared else "ReadWriteOnce"
    return {"size": _SIZES[name], "accessModes": [mode], "storageClassName": ""}


def _replicas(chart: RunChart, name: str) -> dict[str, Any]:
    most = chart.processes[name] if name == ENV else chart.config.topics.partitions
    why = "supervisor.workers, which flow control relies on" if name == ENV else "the partitions of the run's topics"
    return {"type": "integer", "minimum": 0, "maximum": most, "description": f"At most {why}."}


def _resources(cpu: str, memory: str) -> Values:
    return {"requests": {"cpu": cpu, "memory": memory}, "limits": {"memory": memory}}


_FREE = ("resources", "nodeSelector", "affinity", "labels")
"""Tables whose keys are defined by Kubernetes."""


def _schema_of(item: Any, key: str = "") -> dict[str, Any]:
    """Return the schema of values with the same form as `item`."""
    if isinstance(item, Mapping):
        if key in _FREE:
            return {"type": "object"}
        known = {name: _schema_of(inner, name) for name, inner in item.items()}
        return {"type": "object", "additionalProperties": False, "properties": known}
    if isinstance(item, bool):
        return {"type": "boolean"}
    if isinstance(item, int):
        return {"type": "integer", "minimum": 0}
    return {"type": "array"} if isinstance(item, list) else {"type": "string"}
