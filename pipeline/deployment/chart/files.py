"""Files of a chart: templates, values and their schema, the run's configuration file, the dashboard and alert rules."""

import re
from importlib.metadata import version
from typing import Any

from rollstream.infra.monitoring.alerts import alert_rules
from rollstream.infra.monitoring.dashboard import dashboard
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.deployment.chart import brokers, networks, operations, values, workloads
from rollstream.pipeline.deployment.chart.context import BOOTSTRAP, IN_SYNC, REPLICAS, TOOLS, ChartOptions, RunChart
from rollstream.pipeline.deployment.chart.pods import CA_FOLDER, IN_CHART, WITH_USERS, config_flag
from rollstream.pipeline.deployment.chart.templates import (
    Document,
    Raw,
    Template,
    file_text,
    json_text,
    literal,
    value,
    when,
)
from rollstream.pipeline.deployment.container_settings import (
    KAFKA_PORT,
    check_broker_secrets,
    check_brokers,
    check_containers,
)
from rollstream.pipeline.deployment.yaml_text import render_yaml
from rollstream.pipeline.settings import variable_of
from rollstream.topics.errors import ConfigurationError

RUN_FILE = "files/run.toml"
_LARGEST_FILE = 900_000
"""Most bytes of a file in a ConfigMap, which may have 1 MiB in all."""


def chart_files(config: RunConfig, options: ChartOptions) -> dict[str, str]:
    """Return the text of each file of a run's chart, by its path.

    Raises ConfigurationError for a run whose roles cannot run in a cluster.
    """
    _check(config, options)
    chart = RunChart(config, options)
    files = {
        "Chart.yaml": render_yaml(_about(chart)),
        "values.yaml": _commented(values.values(chart), "Values of every release."),
        "values-development.yaml": _commented(values.development(chart), "Added to values.yaml on a local cluster."),
        "values-production.yaml": _commented(values.production(chart), "Added to values.yaml if operators exist."),
        "values.schema.json": json_text(values.schema(chart)),
        operations.DASHBOARD: dashboard(),
        operations.ALERTS: alert_rules(),
        "templates/NOTES.txt": _notes(chart),
    }
    if options.config_text:
        files[RUN_FILE] = options.config_text
    for name, template in _templates(chart).items():
        files[f"templates/{name}.yaml"] = template.text()
    return files


def _templates(chart: RunChart) -> dict[str, Template]:
    return {
        "settings": _settings(chart),
        "kafka": brokers.brokers_template(chart),
        "kafka-topics": brokers.topics_template(chart),
        "kafka-users": brokers.users_template(chart),
        "topics": workloads.topics_template(chart),
        "tools": workloads.tools_template(chart),
        **{role.name: workloads.role_template(chart, role) for role in chart.roles},
        "network-policies": networks.network_template(chart),
        "monitoring": operations.monitoring_template(chart),
        **({"autoscaling": operations.scaling_template(chart)} if "group" in chart.processes else {}),
    }


def _settings(chart: RunChart) -> Template:
    """Return the run's configuration file, and the variables of every pod."""
    theirs = {BOOTSTRAP: value("brokers.bootstrapServers")}
    variables: dict[str, Any] = {name: literal(text) for name, text in chart.variables.items()}
    if chart.own_brokers:
        for name in (REPLICAS, IN_SYNC):
            variables.pop(name, None)
    documents: list[Document] = []
    if chart.options.config_text:
        documents.append(_config_map(chart, "config", {"run.toml": file_text(RUN_FILE)}))
    table = _config_map(chart, "settings", variables)
    table["data"] |= _of_brokers(chart) if chart.own_brokers else theirs
    return Template("Settings of the run.", [*documents, table])


def _of_brokers(chart: RunChart) -> dict[str, Any]:
    """Return the variables that depend on whether the chart runs the brokers, each key once."""
    plain, secured = (brokers.bootstrap(chart, port) for port in (KAFKA_PORT, brokers.SECURED_PORT))
    address = f"(.Values.brokers.security | ternary {_text(secured)} {_text(plain)})"
    address = f".Values.brokers.enabled | ternary {address} .Values.brokers.bootstrapServers"
    client = {
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": brokers.MECHANISM.upper(),
        "ssl_ca_location": f"{CA_FOLDER}/ca.crt",
    }
    return {
        BOOTSTRAP: Raw(f"{{{{ {address} | toJson }}}}"),
        **{
            name: _of_own_brokers(f".Values.brokers.{path}", setting if name in chart.variables else None)
            for name, path, setting in (
                (REPLICAS, "replicationFactor", chart.config.topics.replication_factor),
                (IN_SYNC, "minInSyncReplicas", chart.config.topics.min_insync_replicas),
            )
        },
        **{variable_of(f"kafka.client.{key}"): when(WITH_USERS, text) for key, text in client.items()},
    }


def _of_own_brokers(path: str, given: int | None) -> Any:
    """Return the text of a value if the chart runs the brokers, else the text of the given setting, if there is one."""
    if given is None:
        return when(IN_CHART, Raw(f'"{{{{ {path} }}}}"'))
    return Raw(f'"{{{{ {IN_CHART} | ternary {path} {_text(str(given))} }}}}"')


def _text(text: str) -> str:
    return f'"{text}"'


def _config_map(chart: RunChart, name: str, data: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": chart.metadata(chart.object_name(name), name),
        "data": data,
    }


def _about(chart: RunChart) -> dict[str, Any]:
    return {
        "apiVersion": "v2",
        "name": f"rollstream-{chart.name}",
        "description": f"Run {chart.config.run} of rollstream: its roles, topics and brokers.",
        "type": "application",
        # The digest in the version identifies the settings.
        "version": f"{_semantic(version('rollstream'))}+{chart.digest}",
        "appVersion": version("rollstream"),
        "kubeVersion": ">=1.29.0-0",
    }


def _semantic(text: str) -> str:
    """Return the release as a semantic version, e.g. 0.1.0 for 0.1.0.dev3."""
    match = re.match(r"\d+\.\d+\.\d+", text)
    return match[0] if match else "0.0.0"


def _commented(table: dict[str, Any], about: str) -> str:
    return f"# {about}\n{render_yaml(table)}"


def _notes(chart: RunChart) -> str:
    name, tools = chart.name, chart.object_name(TOOLS)
    command = " ".join(("rollstream", "ledger", *config_flag(chart)))
    return (
        f"Run {chart.config.run}. Its pods:\n\n"
        f"  kubectl get pods -n {{{{ .Release.Namespace }}}} -l app.kubernetes.io/instance={name}\n\n"
        "Workers start once the roles that read their records are ready. Commands about the run:\n\n"
        f"  kubectl scale -n {{{{ .Release.Namespace }}}} deploy/{tools} --replicas 1\n"
        f"  kubectl exec -n {{{{ .Release.Namespace }}}} deploy/{tools} -- {command}\n"
    )


def _check(config: RunConfig, options: ChartOptions) -> None:
    check_containers(config)
    if config.kafka.client.get("security.protocol", "PLAINTEXT") != "PLAINTEXT":
        check_brokers(config)
    else:
        check_broker_secrets(config)
    if config.supervisor.worker_python and not options.worker_image:
        raise ConfigurationError(
            "supervisor.worker_python names a Python of this machine; use --worker-image to name an image that has the "
            "libraries of the environments"
        )
    if config.learner.weights.url and "://" not in config.learner.weights.url:
        raise ConfigurationError(
            f"learner.weights.url is {config.learner.weights.url}, and pods share no directory; name a URL of a store, "
            "such as s3://bucket/weights, or remove the setting, so that weights are sent through the log"
        )
    if len(options.config_text.encode()) > _LARGEST_FILE:
        raise ConfigurationError(
            f"the run's configuration file is larger than {_LARGEST_FILE} bytes, and a ConfigMap may have 1 MiB"
        )
