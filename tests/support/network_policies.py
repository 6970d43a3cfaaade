"""Tells what network policies let through, by the rules of Kubernetes, for pods of one namespace and ports of TCP."""

from collections.abc import Iterable, Mapping
from typing import Any

Labels = Mapping[str, str]
Policy = Mapping[str, Any]


def allowed(policies: Iterable[Policy], source: Labels, target: Labels, port: int) -> bool:
    """Whether a pod with some labels reaches a port of another one."""
    policies = list(policies)
    leaves = _passes(policies, source, "Egress", "to", target, port)
    return leaves and _passes(policies, target, "Ingress", "from", source, port)


def _passes(policies: list[Policy], pod: Labels, direction: str, peers: str, other: Labels, port: int) -> bool:
    specs = [policy["spec"] for policy in policies if _selects(policy["spec"]["podSelector"], pod)]
    ours = [spec for spec in specs if direction in spec["policyTypes"]]
    rules = [rule for spec in ours for rule in spec.get(direction.lower(), ())]
    return not ours or any(_covers(rule.get(peers), other) and _has_port(rule.get("ports"), port) for rule in rules)


def _selects(selector: Mapping[str, Any], labels: Labels) -> bool:
    return selector.get("matchLabels", {}).items() <= labels.items()


def _covers(peers: list[Mapping[str, Any]] | None, labels: Labels) -> bool:
    """Whether a pod of the same namespace is among the peers; no peers means all pods."""
    return not peers or any("podSelector" in peer and _selects(peer["podSelector"], labels) for peer in peers)


def _has_port(ports: list[Mapping[str, Any]] | None, port: int) -> bool:
    tcp = [each for each in ports or () if each.get("protocol") == "TCP"]
    return not ports or any(each["port"] <= port <= each.get("endPort", each["port"]) for each in tcp)
