"""Workloads of a chart: StatefulSets for endless roles, Jobs for roles that finish, a JobSet for a distributed learner.

A pod has its number in its host name, so that a process that is started again keeps what belongs to its number. Jobs
cannot be changed, so their names contain a digest: an upgrade that changes a job creates another and deletes the first.
Two learners at once do no harm, because the brokers fence the older one.
"""

from typing import Any

from rollstream.consumers.learner.checkpoint_paths import is_remote
from rollstream.pipeline.command_line.process_number import AUTO
from rollstream.pipeline.deployment.access_rules import TOPICS
from rollstream.pipeline.deployment.chart.context import PROCESSES, TOOLS, RunChart, values_key
from rollstream.pipeline.deployment.chart.pods import learner_digest, pod_template, pod_values
from rollstream.pipeline.deployment.chart.templates import Template, digest_of, value, when
from rollstream.pipeline.deployment.description import (
    ENV,
    GATEWAY,
    GROUP,
    INFER,
    LABEL,
    LEARN,
    PRUNE,
    SERVE_WEIGHTS,
    RoleDescription,
)

WAIT_S = 600
"""Time in which brokers must answer a job or a pod that waits for them; after it, the job or pod is started again."""
SCALED = (GROUP, LABEL, ENV)
"""Roles whose number of processes is a value of the chart; for other roles, settings depend on it, so it is fixed."""
_RETRIES = 1_000_000
"""Failures after which Kubernetes gives up a job that ends by itself: so many that it never gives up."""
_AUTOSCALED = ".Values.autoscaling.enabled"
_KEPT = {"helm.sh/resource-policy": "keep"}


def role_template(chart: RunChart, role: RoleDescription) -> Template:
    """Return the objects of a role."""
    name = chart.object_name(role.name)
    if role.name == PRUNE:
        return Template(f"{role.name}: {role.does}.", [when(".Values.roles.prune.enabled", [_cron_job(chart, role)])])
    volume = name if keeps_files(chart, role) else ""
    documents: list[Any] = [_claim(chart, role)] if volume else []
    if role.name == LEARN and chart.team:
        documents += [_service(chart, role), _job_set(chart, role, volume), _whole_team(chart, role)]
    elif role.finishes:
        documents += [_service(chart, role), _job(chart, role, volume), _whole_team(chart, role)]
    else:
        documents += [_service(chart, role), _stateful_set(chart, role, volume)]
        if chart.processes[role.name] > 1 or role.name in SCALED:
            documents.append(_budget(chart, role, {"maxUnavailable": 1}))
    if role.is_tool:
        documents = [when(f".Values.roles.{values_key(role.name)}.enabled", documents)]
    return Template(f"{role.name}: {role.does}.", documents)


def topics_template(chart: RunChart) -> Template:
    """Return the job that creates the topics, and writes the first state of grouping."""
    replicas = ("brokers.replicationFactor", "brokers.minInSyncReplicas")
    digest = digest_of(chart.digest, (*pod_values(chart), *replicas, "roles.topics"))
    pod = pod_template(chart, TOPICS, ("topics", "apply", "--wait", str(WAIT_S)), restart="OnFailure")
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": chart.metadata(f"{chart.object_name(TOPICS)}-{digest}", TOPICS),
        "spec": {"backoffLimit": _RETRIES, "template": pod},
    }
    return Template("topics: creates missing topics of the run, and their schemas in a registry.", [job])


def tools_template(chart: RunChart) -> Template:
    """Return the deployment of a pod in which operators run commands, as the user `operate` and with all secrets."""
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": chart.metadata(chart.object_name(TOOLS), TOOLS),
        "spec": {
            "replicas": value(f"roles.{TOOLS}.replicas"),
            "selector": {"matchLabels": chart.labels(TOOLS)},
            "template": pod_template(chart, TOOLS, ()),
        },
    }
    return Template("tools: a pod for commands of operators, which run with `kubectl exec`.", [deployment])


def keeps_files(chart: RunChart, role: RoleDescription) -> bool:
    """Whether a role keeps files that must survive its pod."""
    if role.name == LEARN:
        return not is_remote(chart.config.learner.checkpoint.directory)
    if role.name == SERVE_WEIGHTS:
        # Engines read checkpoints there, except our vLLM plug-in, which writes its own.
        return chart.config.serving.engine != "vllm-plugin"
    return bool(role.keeps)


# ------------------------------------------------------------------ kinds


def _stateful_set(chart: RunChart, role: RoleDescription, volume: str) -> dict[str, Any]:
    name, labels = chart.object_name(role.name), chart.labels(role.name)
    count: Any = chart.processes[role.name]
    if role.name in SCALED:
        count = value(f"roles.{values_key(role.name)}.replicas")
    if role.name == GROUP:
        count = when(f"not {_AUTOSCALED}", count)
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": chart.metadata(name, role.name),
        "spec": {
            "replicas": count,
            "serviceName": name,
            # Processes start without waiting for one another; updates still replace them one by one.
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "RollingUpdate"},
            "selector": {"matchLabels": labels},
            "template": _pod(chart, role, volume),
        },
    }


def _job(chart: RunChart, role: RoleDescription, volume: str) -> dict[str, Any]:
    name = chart.object_name(role.name)
    digest = digest_of(chart.digest, (*pod_values(chart), f"roles.{values_key(role.name)}"))
    pod = _pod(chart, role, volume, restart="OnFailure", subdomain=name)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": chart.metadata(f"{name}-{digest}", role.name),
        "spec": {**_indexed(chart.processes[role.name]), "backoffLimit": _RETRIES, "template": pod},
    }


def _job_set(chart: RunChart, role: RoleDescription, volume: str) -> dict[str, Any]:
    """Return the job of all processes of a learner: if one fails, all start again from their checkpoint.

    Its pods find each other through the service of the chart. JobSet makes that service only if there is none, and
    then it belongs to one JobSet: after an upgrade it would not know the pods of the next JobSet, and would be deleted
    with the first.
    """
    name = chart.object_name(role.name)
    pod = _pod(chart, role, volume, restart="Never")
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": chart.metadata(f"{name}-{learner_digest(chart)}", role.name),
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": _RETRIES},
            "replicatedJobs": [
                {
                    "name": PROCESSES,
                    "replicas": 1,
                    "template": {"spec": {**_indexed(chart.processes[role.name]), "backoffLimit": 0, "template": pod}},
                }
            ],
        },
    }


def _cron_job(chart: RunChart, role: RoleDescription) -> dict[str, Any]:
    pod = pod_template(chart, role.name, role.arguments(AUTO), restart="Never")
    return {
        "apiVersion": "batch/v1",
        "kind": "CronJob",
        "metadata": chart.metadata(chart.object_name(role.name), role.name),
        "spec": {
            "schedule": value(f"roles.{role.name}.schedule"),
            "concurrencyPolicy": "Forbid",
            "jobTemplate": {"spec": {"backoffLimit": 2, "template": pod}},
        },
    }


def _pod(chart: RunChart, role: RoleDescription, volume: str, restart: str = "", subdomain: str = "") -> dict[str, Any]:
    """Return the template of the pods of a role, which wait until the role may start."""
    return pod_template(
        chart,
        role.name,
        role.arguments(AUTO),
        volume=volume,
        waits=_waits(chart, role),
        described=role,
        restart=restart,
        subdomain=subdomain,
    )


def _indexed(count: int) -> dict[str, Any]:
    return {"completionMode": "Indexed", "completions": count, "parallelism": count}


def _waits(chart: RunChart, role: RoleDescription) -> tuple[str, ...]:
    """Return the arguments of `rollstream deploy wait`, which name the roles that must be ready before this role."""
    ready = [name for name in role.after if name in chart.processes]
    flags = [word for name in ready for word in ("--ready", f"{chart.object_name(name)}:{chart.service_port}")]
    return (role.name, "--wait", str(WAIT_S), *flags)


# ------------------------------------------------------------------ what belongs to a workload


def _service(chart: RunChart, role: RoleDescription) -> dict[str, Any]:
    """Return the service that gives each pod its own host name, even before the pod is ready."""
    ports = [{"name": "service", "port": chart.service_port}]
    if role.name == INFER:
        ports.append({"name": "http", "port": _inference_port(chart)})
    if role.name == GATEWAY:
        ports.append({"name": "http", "port": chart.config.gateway.port})
    name = chart.object_name(role.name)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": chart.metadata(name, role.name),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": chart.labels(role.name),
            "ports": ports,
        },
    }


def _inference_port(chart: RunChart) -> int:
    port = chart.settings["inference.port"]
    assert isinstance(port, int)
    return port


def inference_ports(chart: RunChart) -> tuple[int, int]:
    """Return the ports of the first and the last inference server."""
    first = _inference_port(chart)
    return first, first + chart.processes[INFER] - 1


def _claim(chart: RunChart, role: RoleDescription) -> dict[str, Any]:
    path = f"storage.{values_key(role.name)}"
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {**chart.metadata(chart.object_name(role.name), role.name), "annotations": _KEPT},
        "spec": {
            "accessModes": value(f"{path}.accessModes"),
            "storageClassName": when(f".Values.{path}.storageClassName", value(f"{path}.storageClassName")),
            "resources": {"requests": {"storage": value(f"{path}.size")}},
        },
    }


def _whole_team(chart: RunChart, role: RoleDescription) -> Any:
    """Return a job's disruption budget: it allows no voluntary disruption, because the whole job would start again."""
    # For a Job, a budget can only be a number of pods that must stay.
    whole = _budget(chart, role, {"minAvailable": chart.processes[role.name]})
    return when("and .Values.disruptionBudgets.enabled .Values.disruptionBudgets.protectJobs", whole.value)


def _budget(chart: RunChart, role: RoleDescription, allows: dict[str, Any]) -> Any:
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": chart.metadata(chart.object_name(role.name), role.name),
        "spec": {**allows, "selector": {"matchLabels": chart.labels(role.name)}},
    }
    return when(".Values.disruptionBudgets.enabled", [budget])
