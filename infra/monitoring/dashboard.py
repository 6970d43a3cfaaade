"""The Grafana dashboard of a run; each panel is described by the help texts of its metrics in the catalogue."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rollstream.topics.metrics.catalogue import CATALOGUE_OF_METRICS

_UNITS = {"seconds": "s", "bytes": "bytes", "rollouts": "none", "tokens": "none", "": "none"}
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 24
RUN = '{run=~"$run"}'
"""Selector of the runs that a user chooses in the dashboard."""


@dataclass(frozen=True)
class Panel:
    """One graph: a title and expressions with their legends. `{}` stands for the selector of the run."""

    title: str
    expressions: Sequence[tuple[str, str]]
    unit: str = ""
    """A unit of the catalogue; empty: the unit of the first metric; "none": no unit."""


ROWS: dict[str, Sequence[Panel]] = {
    "Health": (
        Panel("Processes ready", [("sum by (run) (rollstream_ready{})", "{{run}}")]),
        Panel(
            "Longest time since a loop's last turn",
            [
                ("max by (process) (rollstream_loop_age_seconds{})", "{{process}}"),
                ("min by (run) (rollstream_loop_stall_seconds{})", "limit of {{run}}"),
            ],
        ),
        Panel(
            "Restarts in half an hour",
            [
                ("changes(max by (process) (process_start_time_seconds{})[30m:1m])", "{{process}}"),
                ("sum by (run) (increase(rollstream_supervisor_restarts_total{}[30m]))", "all of {{run}}"),
            ],
            unit="none",
        ),
    ),
    "Rollouts": (
        Panel(
            "Rollouts per second",
            [
                ("sum by (run) (rate(rollstream_worker_rollouts_total{}[5m]))", "sent"),
                ("sum by (run) (rate(rollstream_grouping_batched_total{}[5m]))", "batched"),
                ("sum by (run) (rate(rollstream_grouping_dropped_total{}[5m]))", "dropped"),
            ],
        ),
        Panel(
            "Share of time spent waiting for capacity",
            [("rate(rollstream_worker_capacity_wait_seconds_total{}[5m])", "{{process}}")],
            unit="none",
        ),
        Panel("Waiting for labels", [("sum by (run) (rollstream_labeling_lag{})", "lag of labeling")]),
    ),
    "Grouping": (
        Panel("Lag", [("sum by (partition) (rollstream_grouping_lag{})", "partition {{partition}}")]),
        Panel(
            "Drops per second by reason",
            [
                (
                    'sum by (reason) (rate(rollstream_grouping_rollouts_total{run=~"$run",fate="dropped"}[5m]))',
                    "{{reason}}",
                )
            ],
        ),
        Panel("Open groups", [("sum by (run) (rollstream_grouping_open_groups{})", "open groups")]),
        Panel(
            "Rollout to batch",
            [
                (
                    "histogram_quantile(0.5, sum by (le) "
                    "(rate(rollstream_grouping_rollout_to_batch_seconds_bucket{}[5m])))",
                    "50 %",
                ),
                (
                    "histogram_quantile(0.99, sum by (le) "
                    "(rate(rollstream_grouping_rollout_to_batch_seconds_bucket{}[5m])))",
                    "99 %",
                ),
            ],
        ),
        Panel(
            "Transactions",
            [
                (
                    "histogram_quantile(0.99, sum by (le) (rate(rollstream_transaction_seconds_bucket{}[5m])))",
                    "99 % of commits",
                )
            ],
        ),
        Panel("Aborted transactions", [("rollstream_transaction_aborts_total{}", "{{process}}")]),
        Panel("Shift of lengths due to lost rollouts", [("rollstream_grouping_shift_length{}", "{{environment}}")]),
        Panel("Restores", [("rollstream_grouping_restore_seconds{}", "partition {{partition}}")]),
    ),
    "Learner": (
        Panel("Step", [("rollstream_learner_step{}", "{{process}}")]),
        Panel("Seconds of a step by stage", [("rollstream_learner_stage_seconds{}", "{{stage}}")]),
        Panel(
            "Reward",
            [("rollstream_learner_trained_reward{}", "trained on"), ("rollstream_worker_reward_mean{}", "{{process}}")],
        ),
        Panel("Loss", [("rollstream_learner_loss{}", "{{process}}")]),
        Panel("Staleness", [("rollstream_learner_off_policy_staleness{}", "{{process}}")]),
        Panel(
            "Sampler versus learner",
            [("rollstream_learner_mismatch_kl_mean{}", "divergence"), ("rollstream_learner_entropy_mean{}", "entropy")],
        ),
        Panel("Tokens per second", [("rollstream_learner_perf_throughput{}", "{{process}}")]),
    ),
    "Weights and inference": (
        Panel(
            "Policy version",
            [
                ("rollstream_learner_policy_version{}", "learner"),
                ("rollstream_inference_policy_version{}", "{{process}}"),
                ("rollstream_serving_policy_version{}", "{{process}}"),
            ],
        ),
        Panel(
            "Age of the version used for sampling",
            [
                ("time() - rollstream_inference_version_timestamp_seconds{}", "{{process}}"),
                ("time() - rollstream_serving_version_timestamp_seconds{}", "{{process}}"),
            ],
        ),
        Panel(
            "Tokens sampled per second",
            [("rate(rollstream_inference_completion_tokens_total{}[5m])", "{{process}}")],
        ),
        Panel(
            "Requests",
            [
                ("rollstream_inference_waiting_requests{}", "{{process}} waiting"),
                ("rollstream_inference_decoding_rows{}", "{{process}} sequences"),
            ],
        ),
    ),
    "Gateway and evaluation": (
        Panel("Calls per second", [("rate(rollstream_gateway_calls_total{}[5m])", "{{process}}")]),
        Panel("Open sessions", [("rollstream_gateway_open_sessions{}", "{{process}}")]),
        Panel("Held-out reward", [("rollstream_evaluation_reward{}", "{{environment}}")]),
        Panel("Held-out success", [("rollstream_evaluation_success{}", "{{environment}}")]),
    ),
}
"""Panels by row."""


def expressions() -> Iterator[str]:
    """Yield every expression of the dashboard."""
    for panels in ROWS.values():
        for panel in panels:
            yield from (expression for expression, _legend in panel.expressions)


def dashboard() -> str:
    """Return the dashboard as JSON that Grafana imports."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        panels.append({"type": "row", "title": title, "gridPos": {"x": 0, "y": top, "w": _COLUMNS, "h": 1}})
        top += 1
        for number, panel in enumerate(row):
            left = number * _WIDTH % _COLUMNS
            top += _HEIGHT * bool(number and not left)
            panels.append(_graph(panel, {"x": left, "y": top, "w": _WIDTH, "h": _HEIGHT}))
        top += _HEIGHT
    for number, each in enumerate(panels, 1):
        each["id"] = number
    board = {
        "title": "rollstream",
        "uid": "rollstream",
        "schemaVersion": 39,
        "editable": True,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "10s",
        "templating": {"list": [_source(), _runs()]},
        "panels": panels,
    }
    return json.dumps(board, indent=2) + "\n"


def _graph(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    described = [spec for spec in CATALOGUE_OF_METRICS if any(spec.name in text for text, _legend in panel.expressions)]
    unit = panel.unit or next((spec.unit for spec in described), "")
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": " ".join(spec.help for spec in described),
        "gridPos": place,
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "fieldConfig": {"defaults": {"unit": _UNITS.get(unit, "none")}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + number), "expr": expression.replace("{}", RUN), "legendFormat": legend}
            for number, (expression, legend) in enumerate(panel.expressions)
        ],
    }


def _source() -> dict[str, Any]:
    return {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _runs() -> dict[str, Any]:
    return {
        "name": "run",
        "label": "Run",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "query": "label_values(rollstream_info, run)",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
    }
