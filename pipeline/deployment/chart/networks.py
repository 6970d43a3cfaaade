"""Network policies of a chart: each pod of the run may connect, and be connected to, only as its work needs."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from rollstream.pipeline.deployment.chart.brokers import SECURED_PORT
from rollstream.pipeline.deployment.chart.context import RunChart, port_of, values_key
from rollstream.pipeline.deployment.chart.pods import CALLERS
from rollstream.pipeline.deployment.chart.templates import Document, Template, each_of, tcp_of_addresses, value, when
from rollstream.pipeline.deployment.chart.workloads import inference_ports
from rollstream.pipeline.deployment.container_settings import KAFKA_PORT
from rollstream.pipeline.deployment.description import ENV, EVAL, GATEWAY, GROUP, INFER, LABEL, LEARN, SERVE_WEIGHTS

_ON = ".Values.networkPolicies.enabled"
_TRACED = (ENV, GATEWAY, GROUP, LEARN, INFER)
"""Roles that make spans."""
_DNS = [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]


def network_template(chart: RunChart) -> Template:
    """Return the policies of the run."""
    return Template("Connections that pods may make and accept.", [when(_ON, list(_policies(chart)))])


def _policies(chart: RunChart) -> Iterator[Document]:
    ports = _tcp(chart.service_port)
    yield _policy(
        chart,
        "run",
        chart.run_labels,
        ingress=[{"from": [_monitoring()], "ports": ports}],
        egress=[{"ports": _DNS}, *_to_brokers(chart), each_of("networkPolicies.egress")],
    )
    waiting = [role.name for role in chart.roles if role.after]
    awaited = {name for role in chart.roles for name in role.after if name in chart.processes}
    for name in sorted(awaited):
        rule = {"from": [_pods(chart, caller) for caller in waiting], "ports": ports}
        yield _policy(chart, f"wait-{name}", chart.labels(name), ingress=[rule])
    for name in waiting:
        rule = {"to": [_pods(chart, other) for other in sorted(awaited)], "ports": ports}
        yield _policy(chart, f"waiting-{name}", chart.labels(name), egress=[rule])
    yield from _of_servers(chart)
    if chart.team:
        among = [_pods(chart, LEARN)]
        yield _policy(chart, "team", chart.labels(LEARN), ingress=[{"from": among}], egress=[{"to": among}])
    for name, urls in _urls(chart).items():
        if urls and name in chart.processes:
            rule = {"ports": _tcp(*sorted({port_of(url) for url in urls}))}
            yield _policy(chart, f"out-{name}", chart.labels(name), egress=[rule])


def _of_servers(chart: RunChart) -> Iterator[Document]:
    callers = [name for name in CALLERS if name in chart.processes]
    if INFER in chart.processes and callers:
        first, last = inference_ports(chart)
        ports = [{"protocol": "TCP", "port": first, **({"endPort": last} if last > first else {})}]
        asking = {"from": [_pods(chart, name) for name in callers], "ports": ports}
        yield _policy(chart, INFER, chart.labels(INFER), ingress=[asking])
        for name in callers:
            rule = {"to": [_pods(chart, INFER)], "ports": ports}
            yield _policy(chart, f"{name}-{INFER}", chart.labels(name), egress=[rule])
    if GATEWAY in chart.processes:
        agents = {"from": value("networkPolicies.agents"), "ports": _tcp(chart.config.gateway.port)}
        yield _policy(chart, GATEWAY, chart.labels(GATEWAY), ingress=[agents])


def _urls(chart: RunChart) -> dict[str, tuple[str, ...]]:
    """Return the URLs, from the settings, of the servers outside the run that each role calls."""
    config = chart.config
    servers = () if INFER in chart.processes else config.worker.inference_urls
    urls: dict[str, tuple[str, ...]] = {
        ENV: servers,
        EVAL: servers,
        GATEWAY: servers,
        SERVE_WEIGHTS: config.serving.urls,
        LABEL: (config.labeling.judge.url,) if config.labeling.judge.url else (),
    }
    if config.traces.endpoint:
        urls |= {role: (*urls.get(role, ()), config.traces.endpoint) for role in _TRACED}
    return urls


def _to_brokers(chart: RunChart) -> list[Any]:
    own = [{"podSelector": {"matchLabels": {"strimzi.io/cluster": chart.cluster}}}]
    rules: list[Any] = []
    if chart.own_brokers:
        rule = {"to": own, "ports": _tcp(KAFKA_PORT, SECURED_PORT)}
        rules.append(when(".Values.brokers.enabled", [rule]))
    rules.append(when("not .Values.brokers.enabled", [{"ports": [tcp_of_addresses("brokers.bootstrapServers")]}]))
    if registry := chart.config.kafka.registry.url:
        rules.append({"ports": _tcp(urlsplit(registry).port or port_of(registry))})
    return rules


def _policy(
    chart: RunChart,
    name: str,
    labels: dict[str, str],
    *,
    ingress: list[Any] | None = None,
    egress: list[Any] | None = None,
) -> Document:
    rules = {"ingress": ingress, "egress": egress}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": chart.metadata(chart.object_name(f"net-{values_key(name).lower()}"), "network"),
        "spec": {
            "podSelector": {"matchLabels": labels},
            "policyTypes": [kind.capitalize() for kind, rule in rules.items() if rule is not None],
            **{kind: rule for kind, rule in rules.items() if rule is not None},
        },
    }


def _pods(chart: RunChart, role: str) -> dict[str, Any]:
    return {"podSelector": {"matchLabels": chart.labels(role)}}


def _monitoring() -> dict[str, Any]:
    labels = {"kubernetes.io/metadata.name": value("networkPolicies.monitoringNamespace")}
    return {"namespaceSelector": {"matchLabels": labels}}


def _tcp(*ports: int) -> list[dict[str, Any]]:
    return [{"protocol": "TCP", "port": port} for port in ports]
