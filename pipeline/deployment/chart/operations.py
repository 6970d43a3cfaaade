"""Objects that monitor and scale a run in a cluster, for Prometheus' operator, Grafana and KEDA."""

from typing import Any

from rollstream.pipeline.deployment.chart.context import RunChart
from rollstream.pipeline.deployment.chart.templates import Template, file_object, file_text, value, when
from rollstream.pipeline.deployment.description import GROUP
from rollstream.pipeline.deployment.scaling import lag_query

DASHBOARD, ALERTS = "files/rollstream-dashboard.json", "files/rollstream-alerts.json"
_MONITORING = "monitoring.coreos.com/v1"


def monitoring_template(chart: RunChart) -> Template:
    """Return the objects by which Prometheus and Grafana monitor the run."""
    pods = {
        "apiVersion": _MONITORING,
        "kind": "PodMonitor",
        "metadata": _labelled(chart),
        "spec": {
            "selector": {"matchLabels": chart.run_labels},
            "podMetricsEndpoints": [{"port": "service", "path": "/metrics", "interval": "15s"}],
        },
    }
    rules = {
        "apiVersion": _MONITORING,
        "kind": "PrometheusRule",
        "metadata": _labelled(chart),
        "spec": file_object(ALERTS),
    }
    board = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        # The label by which the sidecar of Grafana's chart finds dashboards.
        "metadata": {"name": chart.object_name("dashboard"), "labels": {"grafana_dashboard": "1"}},
        "data": {"rollstream.json": file_text(DASHBOARD)},
    }
    return Template(
        "Metrics, alerts and a dashboard.",
        [
            when(".Values.monitoring.podMonitor", [pods]),
            when(".Values.monitoring.rules", [rules]),
            when(".Values.monitoring.dashboard", [board]),
        ],
    )


def scaling_template(chart: RunChart) -> Template:
    """Return the scaling of grouping by the lag of its tasks.

    KEDA's own scaler for Kafka never sees a lag of 0 after transactions, because their markers occupy offsets, too.
    """
    scaled = {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": chart.metadata(chart.object_name(GROUP), GROUP),
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": chart.object_name(GROUP)},
            # Without a process, nothing would report the lag.
            "minReplicaCount": value("autoscaling.minReplicas"),
            "maxReplicaCount": value("autoscaling.maxReplicas"),
            "cooldownPeriod": value("autoscaling.cooldownSeconds"),
            "advanced": {
                "horizontalPodAutoscalerConfig": {
                    # Partitions of a removed process are idle until its session ends, so remove processes rarely, and
                    # one at a time.
                    "behavior": {
                        "scaleDown": {
                            "stabilizationWindowSeconds": value("autoscaling.cooldownSeconds"),
                            "policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}],
                        }
                    }
                }
            },
            "triggers": [
                {
                    "type": "prometheus",
                    "metadata": {
                        "serverAddress": value("autoscaling.prometheus"),
                        "query": lag_query(chart.config.run),
                        "threshold": value("autoscaling.lagPerReplica"),
                        "ignoreNullValues": "false",
                    },
                }
            ],
        },
    }
    return Template("Scaling of grouping by its lag, with KEDA.", [when(".Values.autoscaling.enabled", [scaled])])


def _labelled(chart: RunChart) -> dict[str, Any]:
    return {"name": chart.name, "labels": value("monitoring.labels")}
