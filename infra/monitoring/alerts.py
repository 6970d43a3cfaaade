"""Prometheus alert rules: conditions that need a person, each with the section of the runbook that helps.

The rules are written as JSON, which is also YAML.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One alert rule."""

    name: str
    expression: str
    lasts: str
    """How long the expression must be true before the alert fires."""
    severity: str
    summary: str
    remedy: str
    section: str
    """Heading of the section in docs/runbook.md that explains the alert."""

    @property
    def runbook(self) -> str:
        """Page and section of the runbook, for the person who gets the alert."""
        return f"docs/runbook.md#{self._anchor}"

    @property
    def page(self) -> str:
        """The same section of the built documentation."""
        return f"runbook.html#{self._anchor}"

    @property
    def _anchor(self) -> str:
        return self.section.lower().replace(" ", "-")


ALERTS = (
    Alert(
        name="RollstreamLoopStuck",
        expression=(
            "max by (run, process, loop) (rollstream_loop_age_seconds) "
            "> on (run, process) group_left () max by (run, process) (rollstream_loop_stall_seconds)"
        ),
        lasts="1m",
        severity="critical",
        summary="{{ $labels.process }} of run {{ $labels.run }} has made no progress in {{ $labels.loop }}",
        remedy="Restart the process: no record of a topic is lost. The process's log ends where it is stuck.",
        section="A process crash-loops or is stuck",
    ),
    Alert(
        name="RollstreamNotReady",
        expression="max by (run, process) (rollstream_ready) == 0",
        lasts="15m",
        severity="warning",
        summary="{{ $labels.process }} of run {{ $labels.run }} does not become ready",
        remedy="Its log says what it waits for.",
        section="A process crash-loops or is stuck",
    ),
    Alert(
        name="RollstreamRestarts",
        # No supervisor counts the restarts of containers, and a new pod has another address: the newest start of each
        # process counts. Without this metric (macOS), the supervisor's counter remains.
        expression=(
            'changes(max by (run, process) (process_start_time_seconds{run!="",process!=""})[30m:1m]) > 1 '
            "or on (run) sum by (run, process) (increase(rollstream_supervisor_restarts_total[30m])) > 1"
        ),
        lasts="0m",
        severity="warning",
        summary="Processes of run {{ $labels.run }} exit and are started again ({{ $labels.process }})",
        remedy="The logs of the run name the cause.",
        section="A process crash-loops or is stuck",
    ),
    Alert(
        name="RollstreamGroupingLags",
        expression=(
            "sum by (run) (rollstream_grouping_lag) > 0 and sum by (run) (delta(rollstream_grouping_lag[15m])) > 0 "
            "and sum by (run) (rate(rollstream_grouping_transactions_total[15m])) == 0"
        ),
        lasts="15m",
        severity="critical",
        summary="Grouping of run {{ $labels.run }} commits nothing while its lag grows",
        remedy="Look for open transactions with `rollstream broker mend`, and read the logs of the grouping processes.",
        section="Lag grows",
    ),
    Alert(
        name="RollstreamPartitionPaused",
        expression="max by (run, partition) (rollstream_grouping_paused) > 0",
        lasts="30m",
        severity="warning",
        summary="Partition {{ $labels.partition }} of run {{ $labels.run }} is paused, and its rollouts grow stale",
        remedy="Run `rollstream role group resume` once the reason for the pause is gone.",
        section="A partition is stuck",
    ),
    Alert(
        name="RollstreamRetentionNear",
        expression="min by (run, partition) (rollstream_grouping_seconds_to_retention) < 3600",
        lasts="1m",
        severity="critical",
        summary="Brokers will delete unread rollouts of run {{ $labels.run }} within an hour",
        remedy="Run `rollstream topics apply`, so that the topic keeps everything again; then see why grouping lags.",
        section="Lag grows",
    ),
    Alert(
        name="RollstreamDeadLetters",
        expression="increase(rollstream_grouping_dead_lettered_total[15m]) > 0",
        lasts="0m",
        severity="warning",
        summary="Records of run {{ $labels.run }} could not be used",
        remedy="`rollstream dlq ls` names them.",
        section="Records cannot be used",
    ),
    Alert(
        name="RollstreamSelectionBias",
        # Grouping decides by the shift and its standard error, which depends on the numbers of rollouts.
        expression="max by (run, environment, measure) (rollstream_grouping_selection_biased) > 0",
        lasts="30m",
        severity="warning",
        summary="Lost rollouts bias the {{ $labels.measure }} of run {{ $labels.run }} in {{ $labels.environment }}",
        remedy="docs/losses.md says which settings lose rollouts.",
        section="The learner stalls or learns the wrong thing",
    ),
    Alert(
        name="RollstreamRolloutsLeftOut",
        expression=(
            "sum by (run, process) (sum_over_time(rollstream_learner_left_out[30m])) "
            "> 0.05 * sum by (run, process) (sum_over_time(rollstream_learner_trained_rollouts[30m]))"
        ),
        lasts="10m",
        severity="warning",
        summary="The learner of run {{ $labels.run }} leaves out more than a twentieth of its rollouts",
        remedy="The label `reason` of rollstream_learner_left_out says why; docs/losses.md has the remedies.",
        section="The learner stalls or learns the wrong thing",
    ),
    Alert(
        name="RollstreamTransactionsAbort",
        expression="increase(rollstream_transaction_aborts_total[15m]) > 5",
        lasts="0m",
        severity="warning",
        summary="Transactions of {{ $labels.process }} of run {{ $labels.run }} are aborted again and again",
        remedy="Its log names the errors of the brokers.",
        section="A broker is lost",
    ),
    Alert(
        name="RollstreamLearnerStalls",
        # Half an hour while the learner runs. One that resumes after a long stop has ten minutes for its first step.
        expression="time() - max by (run) (rollstream_learner_step_timestamp_seconds) > 1200",
        lasts="10m",
        severity="critical",
        summary="The learner of run {{ $labels.run }} has made no step for half an hour",
        remedy="rollstream_learner_stage_seconds and the lag of grouping say what it waits for.",
        section="The learner stalls or learns the wrong thing",
    ),
    Alert(
        name="RollstreamMismatch",
        # The defaults of learner.loss.mismatch_limit and stale_mismatch_limit: older policies may differ more.
        expression="rollstream_learner_mismatch_kl_mean > 0.02 + 0.05 * rollstream_learner_off_policy_staleness",
        lasts="10m",
        severity="warning",
        summary="Sampler and learner of run {{ $labels.run }} disagree about log-probabilities",
        remedy="docs/losses.md names the likely causes.",
        section="The learner stalls or learns the wrong thing",
    ),
    Alert(
        name="RollstreamVersionOld",
        expression=(
            "max by (run) (rollstream_learner_policy_version) "
            "- on (run) min by (run) (rollstream_inference_policy_version) > 8"
        ),
        lasts="10m",
        severity="warning",
        summary="An inference server of run {{ $labels.run }} does not follow the learner",
        remedy="Its log names the version that it could not load.",
        section="Sampling falls behind",
    ),
    Alert(
        name="RollstreamEnginesUnreachable",
        expression="rollstream_serving_unreachable_replicas > 0",
        lasts="5m",
        severity="warning",
        summary="Engines of run {{ $labels.run }} do not answer",
        remedy="The log of serve-weights names them.",
        section="Sampling falls behind",
    ),
)
"""All rules; rules about every process come first."""


def expressions() -> Iterator[str]:
    """Yield the expression of every rule."""
    yield from (alert.expression for alert in ALERTS)


def alert_rules(docs: str = "") -> str:
    """Return the rules as the text of a file for `rule_files`; `docs` is the URL of the built documentation, if the
    rules are to link to the runbook there."""
    site = docs.rstrip("/")
    rules = [
        {
            "alert": alert.name,
            "expr": alert.expression,
            "for": alert.lasts,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary, "description": alert.remedy, "runbook": alert.runbook}
            | ({"runbook_url": f"{site}/{alert.page}"} if site else {}),
        }
        for alert in ALERTS
    ]
    return json.dumps({"groups": [{"name": "rollstream", "rules": rules}]}, indent=2) + "\n"
