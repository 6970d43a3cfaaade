"""Dashboard and alert rules: every name and label in them is in the catalogue, and both files can be loaded."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rollstream.consumers.learner.objective import LossConfig
from rollstream.infra.monitoring import alerts, dashboard
from rollstream.topics.metrics.catalogue import CATALOGUE_OF_METRICS, COMMON
from tests.support.paths import ROOT

SPECS = {spec.name: spec for spec in CATALOGUE_OF_METRICS}
EXPRESSIONS = [*dashboard.expressions(), *alerts.expressions()]


def named(expression: str) -> set[str]:
    """Names of the metrics in an expression; a histogram's name is without the suffixes of its series."""
    names = re.findall(r"rollstream_\w+", expression)
    return {name if name in SPECS else re.sub(r"_(bucket|sum|count)$", "", name) for name in names}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_names_metrics_and_labels_of_the_catalogue_alone(expression: str) -> None:
    names = named(expression)
    assert names or "process_start_time_seconds" in expression, "every process has it from Prometheus' client"
    assert names <= set(SPECS)
    labels = {*COMMON, "le"}.union(*(SPECS[name].labels for name in names))
    used = [label for by in re.findall(r"(?:by|on) \(([a-z_, ]+)\)", expression) for label in by.split(", ")]
    used += re.findall(r"[{,](\w+)=", expression)
    assert set(used) <= labels
    assert expression.count("(") == expression.count(")")


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_counters_are_read_as_rates_and_gauges_are_not(expression: str) -> None:
    rated = set(re.findall(r"(?:rate|increase)\((rollstream_\w+)", expression))
    for name in re.findall(r"rollstream_\w+", expression):
        series = SPECS.get(name)
        grows = series is None or series.kind == "counter"
        shown_whole = series is not None and f"{name}{{}}" == expression
        assert (name in rated) == grows or shown_whole


def test_labels_in_legends_and_messages_are_those_of_their_expressions() -> None:
    pairs = [(text, legend) for row in dashboard.ROWS.values() for panel in row for text, legend in panel.expressions]
    pairs += [(alert.expression, alert.summary) for alert in alerts.ALERTS]
    for expression, text in pairs:
        kept = re.findall(r"by \(([a-z_, ]+)\)", expression)
        labels = set(COMMON).union(*(SPECS[name].labels for name in named(expression)))
        if kept:
            labels = {label for by in kept for label in by.split(", ")}
        assert set(re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}", text)) <= labels, text


def test_the_alert_of_a_mismatch_has_the_learners_limits() -> None:
    [expression] = [alert.expression for alert in alerts.ALERTS if alert.name == "RollstreamMismatch"]
    limits = LossConfig()
    assert expression.endswith(
        f"> {limits.mismatch_limit} + {limits.stale_mismatch_limit} * rollstream_learner_off_policy_staleness"
    )


def test_the_alert_of_a_stuck_loop_has_the_limit_of_the_process() -> None:
    [expression] = [alert.expression for alert in alerts.ALERTS if alert.name == "RollstreamLoopStuck"]
    assert expression.endswith("max by (run, process) (rollstream_loop_stall_seconds)")


def test_every_alert_leads_to_a_section_of_the_runbook_which_names_it() -> None:
    page = (ROOT / "docs" / "runbook.md").read_text()
    headings = re.findall(r"^## (.+)$", page, re.MULTILINE)
    led_to = {
        name: section
        for names, section in re.findall(r"^\| (`Rollstream.+?) \| \[(.+?)\]", page, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", names)
    }
    assert led_to == {alert.name: alert.section for alert in alerts.ALERTS}
    assert set(led_to.values()) <= set(headings)


def test_the_command_writes_both_files(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "rollstream", "deploy", "monitoring", str(tmp_path / "new")]
    written = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    board, rules = (json.loads(Path(path).read_text()) for path in written)
    graphs = [panel for panel in board["panels"] if panel["type"] == "timeseries"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert all(panel["description"] for panel in graphs)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(places)) == len(places)
    assert all('run=~"$run"' in target["expr"] for panel in graphs for target in panel["targets"])
    [group] = rules["groups"]
    assert {rule["labels"]["severity"] for rule in group["rules"]} == {"critical", "warning"}
    assert all(rule["annotations"]["runbook"].startswith("docs/runbook.md#") for rule in group["rules"])
    assert not any("runbook_url" in rule["annotations"] for rule in group["rules"])
    subprocess.run([*command, "--docs", "https://docs.example/rollstream/"], capture_output=True, check=True)
    [group] = json.loads((tmp_path / "new" / "rollstream-alerts.yml").read_text())["groups"]
    for notes in (rule["annotations"] for rule in group["rules"]):
        anchor = notes["runbook"].partition("#")[2]
        assert notes["runbook_url"] == f"https://docs.example/rollstream/runbook.html#{anchor}"
