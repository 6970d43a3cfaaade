"""The catalogue of served metrics: name, kind, unit, labels and meaning of every metric at /metrics, by role.

Dashboards, alert rules and `rollstream --help-metrics` are made from it. An entry gives the name under which a metric
of the topic `metrics` is served; tests fail for a name with neither an entry nor a reason in `NOT_SERVED`.
"""

from collections.abc import Mapping

from rollstream.topics.metrics.specs import PREFIX as PREFIX
from rollstream.topics.metrics.specs import Kind as Kind
from rollstream.topics.metrics.specs import MetricSpec as MetricSpec
from rollstream.topics.metrics.specs import metric_rows as _rows
from rollstream.topics.metrics.specs import time_of_change as _changed

COMMON = ("run", "process")
"""Labels of every metric at a service port: the run, and the process within it, such as group-0."""
SUBJECTS = ("partition", "environment")
"""Labels that name the subject of a record of topic `metrics`."""
LATENCIES_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
"""Upper bounds of the buckets of histograms."""

SERVING_ROLES = (
    "run",
    "learn",
    "infer",
    "engine",
    "serve-weights",
    "group",
    "label",
    "env",
    "gateway",
    "eval",
    "collect",
    "fill",
    "sink",
)
"""Commands that serve metrics."""

_PROCESS = (
    MetricSpec(
        name="rollstream_info",
        roles=SERVING_ROLES,
        help="Always 1; the labels name the role and version that run.",
        labels=("role", "version"),
    ),
    MetricSpec(name="rollstream_ready", roles=SERVING_ROLES, help="1 while the process takes work, else 0."),
    MetricSpec(
        name="rollstream_loop_age_seconds",
        roles=SERVING_ROLES,
        help="Time since the last iteration of a loop of the process.",
        unit="seconds",
        labels=("loop",),
    ),
    MetricSpec(
        name="rollstream_loop_stall_seconds",
        roles=SERVING_ROLES,
        help="Time without an iteration after which a loop counts as stuck: service.stall_s.",
        unit="seconds",
    ),
    MetricSpec(
        name="rollstream_uncatalogued_metrics",
        roles=SERVING_ROLES,
        help="Number of metrics that the catalogue lacks; expected to be 0.",
    ),
    MetricSpec(
        name="rollstream_traces_spans_total",
        roles=SERVING_ROLES,
        help="Spans that the collector accepted.",
        kind="counter",
        when="traces.endpoint is set",
    ),
    MetricSpec(
        name="rollstream_traces_lost_total",
        roles=SERVING_ROLES,
        help="Spans that were lost because the collector was slow or unavailable.",
        kind="counter",
        when="traces.endpoint is set",
    ),
)

_EXACTLY_ONCE = (
    MetricSpec(
        name="rollstream_transaction_seconds",
        roles=("group", "label"),
        help="Duration of a committed transaction, from its first record to the end of the commit.",
        kind="histogram",
        unit="seconds",
    ),
    MetricSpec(
        name="rollstream_transaction_aborts_total",
        roles=("group", "label"),
        help="Transactions that were aborted, and repeated or taken over.",
        kind="counter",
    ),
)

_GROUPING = (
    *_rows(
        "group",
        "grouping",
        {
            "position": "Next offset of `rollouts` that the task reads.",
            "lag": "Records of `rollouts` between the task's position and the end of the log; 0 once all are read.",
            "in_flight": "Rollouts read and not yet finished; they are in open groups or wait for a batch.",
            "open_groups": "Groups that are not complete.",
            "held_bytes": "Memory that unfinished groups take, as grouping.capacity_bytes counts it.",
            "policy_version": "Newest policy version that the task knows, -1 before the first.",
            "stream_time_s": "Stream time of the task, in seconds since the Unix epoch.",
            "paused": "1 while an operator has paused the partition, else 0.",
        },
        labels=("partition",),
        units={"lag": "records"},
        names={"stream_time_s": "stream_time_seconds"},
    ),
    *_rows(
        "group",
        "grouping",
        {
            "seconds_to_retention": "Shortest time until the broker deletes records of `rollouts` that the task has "
            "not read."
        },
        labels=("partition",),
        when="retention.ms of `rollouts` is set and records are unread",
    ),
    *_rows(
        "group",
        "grouping",
        {
            "restore_journal_read": "Journal records read by the restore in progress.",
            "restore_journal_to_read": "Journal records that the restore reads in total.",
            "restore_records_read": "Rollouts read by the restore in progress.",
            "restore_records_to_read": "Rollouts that the restore reads in total.",
            "restore_seconds": "Time that the restore has taken so far.",
        },
        labels=("partition",),
        when="a task is being restored",
        units={"restore_journal_read": "records", "restore_journal_to_read": "records"},
    ),
    MetricSpec(
        name="rollstream_grouping_rollouts_total",
        roles=("group",),
        help="Records of `rollouts` by fate and reason, since the run began.",
        kind="counter",
        unit="rollouts",
        labels=("partition", "fate", "reason"),
        when="a record was read",
    ),
    MetricSpec(
        name="rollstream_grouping_rollout_to_batch_seconds",
        roles=("group",),
        help="Time from the end of a rollout, by its worker's clock, to the commit of its batch.",
        kind="histogram",
        unit="seconds",
    ),
    *_rows(
        "group",
        "grouping",
        {
            "transactions_total": "Transactions committed.",
            "batches_total": "Batches committed.",
            "batched_total": "Rollouts in committed batches.",
            "dropped_total": "Rollouts dropped.",
            "dead_lettered_total": "Records that went to `dead-letters`.",
            "finished_groups_total": "Groups finished.",
            "records_skipped_total": "Records of `policies` and the journal that could not be read.",
            "settings_ignored": "Settings of the process that are ignored because the settings on the log differ.",
            "partitions": "Partitions that the process works on.",
            "partitions_restoring": "Partitions whose task is being restored.",
        },
        units={"batched_total": "rollouts", "dropped_total": "rollouts"},
    ),
    *_rows(
        "group",
        "grouping",
        {
            "shift_length": "Shift of the mean length by lost rollouts, in standard deviations over produced rollouts.",
            "shift_reward": "Shift of the mean reward by lost rollouts, in standard deviations over produced rollouts.",
            "produced_rollouts": "Rollouts of the environment that were read.",
            "batched_rollouts": "Rollouts of the environment in batches.",
            "without_gradient_rollouts": "Rollouts dropped because they would have changed no parameter.",
            "lost_rollouts": "Rollouts dropped that would have been trained on.",
        },
        labels=("environment",),
        when="a rollout was read",
    ),
    *_rows(
        "group",
        "grouping",
        {"biased/*": "1 while lost rollouts bias the mean of a measure, and not by chance, else 0."},
        labels=("environment", "measure"),
        names={"biased/*": "selection_biased"},
        when="a rollout was read",
    ),
)

_LABELING = _rows(
    "label",
    "labeling",
    {
        "labelled_total": "Records labeled and committed.",
        "left_out_total": "Records that the labeler left out.",
        "dead_lettered_total": "Records that went to `dead-letters`.",
        "lag": "Records of `unlabelled` between the process's positions and the ends of the log.",
    },
    units={"lag": "records"},
)

_LEARNING = (
    *_rows(
        "learn",
        "learner",
        {"step": "Newest step on record.", "policy_version": "Newest policy version that a step has published."},
    ),
    _changed("learn", "learner_step_timestamp_seconds", "step", "Time at which the newest step was recorded."),
    *_rows(
        "learn",
        "learner",
        {
            "loss": "Loss of the newest step.",
            "optim/lr": "Learning rate.",
            "optim/skipped": "Updates of the newest step that were skipped.",
            "packing/tokens": "Tokens of the newest step.",
            "packing/microbatches": "Microbatches of the newest step.",
            "packing/trained_tokens": "Tokens of the newest step that were trained on.",
            "packing/padding_fraction": "Share of the rows of the newest step that was padding.",
            "packing/too_long": "Rollouts of the newest step that did not fit a row.",
        },
    ),
    *_rows(
        "learn",
        "learner",
        {
            "entropy/mean": "Entropy of the policy on the newest step.",
            "mismatch_kl/mean": "Divergence of the learner's log-probabilities from the sampler's.",
            "mismatch_log_ratio/mean": "Mean of the learner's log-probability minus the sampler's.",
            "clip_ratio/low_mean": "Share of tokens below the lower bound of the loss.",
            "clip_ratio/high_mean": "Share of tokens above the upper bound of the loss.",
            "clip_ratio/cap_mean": "Share of tokens above learner.loss.ratio_cap with a negative advantage.",
            "optim/grad_norm": "Norm of the gradient before clipping.",
            "trained/reward": "Mean reward of the rollouts trained on.",
            "trained/reward_std": "Standard deviation of the rewards of the rollouts trained on.",
            "trained/completions/mean_length": "Mean length of the answers trained on.",
            "trained/completions/clipped_ratio": "Share of the answers trained on that were truncated.",
            "trained/rollouts": "Rollouts of the newest step.",
            "off_policy/staleness": "Mean age of the rollouts trained on.",
            "off_policy/reused": "Share of the rollouts trained on that had been trained on before.",
            "perf/throughput": "Tokens per second over the whole duration of a step, of all devices.",
            "perf/device_throughput": "Tokens per second over the whole duration of a step, of each device.",
            "perf/device_flops": "Operations per second that the model needs on each device, without attention scores.",
        },
        when="a step was trained",
        units={
            "off_policy/staleness": "steps",
            "perf/throughput": "tokens per second",
            "perf/device_throughput": "tokens per second",
            "perf/device_flops": "operations per second",
            "trained/completions/mean_length": "tokens",
        },
    ),
    *_rows(
        "learn",
        "learner",
        {"time/*": "Time of a stage of the newest step; load and broadcast_weights overlap with training."},
        labels=("stage",),
        names={"time/*": "stage_seconds"},
    ),
    *_rows(
        "learn",
        "learner",
        {
            "importance/weight_mean": "Mean importance weight.",
            "importance/limited_mean": "Share of tokens whose weight was limited.",
            "importance/effective_sample_fraction": "Effective sample size of the weights, over the trained tokens.",
            "rejection/token_mean": "Share of tokens masked by learner.loss.reject_token.",
            "rejection/sequence_mean": "Share of tokens masked by learner.loss.reject_sequence.",
            "rejection/geometric_mean": "Share of tokens masked by learner.loss.reject_geometric.",
            "distillation/kl_mean": "Mean of the learner's log-probability minus that of learner.teacher.",
            "sequence_mask/masked_mean": "Share of tokens masked by learner.loss.sequence_mask_limit.",
            "kl/mean": "Divergence from the reference policy.",
        },
        when="the loss computes it",
    ),
    *_rows(
        "learn",
        "learner",
        {"warm_start/*": "A metric of the last update of the warm start."},
        labels=("measure",),
        when="the learner began with a warm start",
    ),
    *_rows(
        "learn",
        "learner",
        {
            "replay/difference": "Relative difference between the newest step, executed again, and its record.",
            "perf/mfu": "Operations per second on each device, as a share of the device's stated peak.",
        },
        when="the step differs from its record, or the peak of the device is known",
    ),
    *_rows(
        "learn",
        "learner",
        {"left_out/*": "Rollouts of the newest step that were left out."},
        labels=("reason",),
        when="a rollout was left out",
        units={"left_out/*": "rollouts"},
    ),
)

_PRODUCING = (
    *_rows(
        "env",
        "worker",
        {
            "groups_total": "Groups begun.",
            "rollouts_total": "Rollouts sent.",
            "tokens_total": "Tokens sampled for the rollouts sent.",
            "cancelled_total": "Rollouts cancelled on the log.",
            "failed_total": "Rollouts that failed.",
            "capacity_wait_seconds_total": "Time in which no group could begin because there was no room.",
            "waiting_for_capacity": "1 while no group can begin because there is no room, else 0.",
            "groups_in_flight": "Groups being played.",
            "reward_mean": "Mean reward of the rollouts sent.",
            "policy_version": "Newest policy version that a server reported, -1 before the first.",
            "outstanding": "Rollouts of all workers on their way to the learner, as this worker sees them.",
            "mine_unseen": "Rollouts of this worker that grouping has not read.",
            "records_skipped_total": "Records that could not be read.",
            "waiting_for_labels": "Rollouts of this worker that wait for labels.",
        },
        units={"cancelled_total": "rollouts", "failed_total": "rollouts", "outstanding": "rollouts"},
    ),
    *_rows(
        "gateway",
        "gateway",
        {
            "requests_total": "Requests for model calls.",
            "calls_total": "Model calls written to the log.",
            "errors_total": "Requests answered with an error.",
            "records_skipped_total": "Records of `calls` that could not be read.",
            "open_sessions": "Sessions that are open.",
            "policy_version": "Newest policy version that a server reported, -1 before the first.",
        },
    ),
    *_rows(
        "collect",
        "collecting",
        {"steps_total": "Chunk steps played.", "trajectories_total": "Trajectories sent."},
    ),
    *_rows(
        "fill",
        "filling",
        {"added_total": "Trajectories filled in.", "refused_total": "Records left out as invalid."},
        units={"added_total": "trajectories", "refused_total": "records"},
    ),
)

_SERVING = (
    *_rows(
        "infer",
        "inference",
        {
            "requests_total": "Requests answered.",
            "errors_total": "Requests answered with an error.",
            "decode_calls_total": "Calls of the decoder.",
            "rows_total": "Sequences sampled.",
            "prompt_tokens_total": "Tokens of the prompts.",
            "completion_tokens_total": "Tokens sampled.",
            "generate_seconds_total": "Time in the decoder.",
            "weight_swaps_total": "Policy versions loaded.",
            "policy_version": "Policy version in use for sampling, -1 before the first.",
            "waiting_requests": "Requests that wait for a slot.",
            "admitted_requests": "Requests admitted and not yet answered.",
            "decoding_rows": "Sequences being sampled.",
            "max_rows": "Slots for sequences.",
            "cache_bytes": "Size of the cache of keys and values.",
        },
    ),
    _changed(
        "infer",
        "inference_version_timestamp_seconds",
        "policy_version",
        "Time at which the policy version in use for sampling was loaded.",
    ),
    *_rows(
        "serve-weights",
        "serving",
        {
            "replicas": "Engines.",
            "serving_replicas": "Engines that sample with a version of the run.",
            "drained_replicas": "Engines that stay paused because an update failed.",
            "unreachable_replicas": "Engines that do not answer.",
            "policy_version": "Lowest policy version among the serving engines, -1 before the first.",
            "newest_version": "Newest policy version that is ready for engines, -1 before the first.",
            "weight_swaps_total": "Versions loaded by engines.",
            "failed_updates_total": "Updates that failed.",
            "paused_seconds_total": "Time in which engines were paused for updates.",
        },
    ),
    _changed(
        "serve-weights",
        "serving_version_timestamp_seconds",
        "policy_version",
        "Time at which the lowest version of the engines last changed.",
    ),
)

_EVALUATING = (
    *_rows(
        "eval",
        "evaluation",
        {
            "evaluations_total": "Evaluations finished.",
            "prompts_total": "Prompts answered in finished evaluations.",
            "failed_total": "Evaluations that failed.",
            "policy_version": "Version evaluated last, -1 before the first.",
        },
    ),
    *_rows(
        "eval",
        "evaluation",
        {
            "eval/version": "Newest policy version evaluated.",
            "eval/lowest_version": "Lowest version that answered.",
            "eval/highest_version": "Highest version that answered.",
            "eval/prompts": "Prompts of the evaluation.",
            "eval/reward": "Mean reward.",
            "eval/success": "Share of the answers that succeeded.",
            "records_skipped_total": "Records that could not be read.",
        },
        labels=("environment",),
        when="an evaluation has ended",
        names={
            **{f"eval/{name}": name for name in ("version", "lowest_version", "highest_version", "reward", "success")},
            "eval/prompts": "newest_prompts",
        },
    ),
    *_rows(
        "eval",
        "evaluation",
        {"eval/pass@*": "Estimated probability that at least one of k answers succeeds."},
        labels=("environment", "k"),
        when="an evaluation samples several answers",
        names={"eval/pass@*": "pass_at"},
    ),
    *_rows(
        "eval",
        "evaluation",
        {"eval/*": "Mean of a component of the reward."},
        labels=("environment", "component"),
        when="the reward has components",
        names={"eval/*": "component"},
    ),
)

_STALLED = {
    "stalled": "1 if the run is stalled: no step for supervisor.step_patience_s, or for the time of five "
    "median steps if that is longer; else 0. The event run_stalled names the stage."
}
_SUPERVISING = (
    *_rows(
        "run",
        "supervisor",
        {
            "processes": "Processes of the run.",
            "processes_ready": "Processes that run and are ready.",
            "restarts_total": "Processes started again after an exit.",
        },
    ),
    *_rows("run", "supervisor", _STALLED, when="the run has a learner"),
)

CATALOGUE_OF_METRICS: tuple[MetricSpec, ...] = (
    *(*_PROCESS, *_SUPERVISING, *_LEARNING, *_SERVING, *_EXACTLY_ONCE),
    *(*_GROUPING, *_LABELING, *_PRODUCING, *_EVALUATING),
)

NOT_SERVED: Mapping[str, str] = {
    "*_per_s": "rate() of the total gives the same",
    "running": "`up` gives the same",
    "commit_seconds_*": "rollstream_transaction_seconds gives more",
    "*_mean_length": "by environment and kind; the shifts are computed from them",
    "*_mean_reward": "by environment and kind; the shifts are computed from them",
}
"""Names on topic `metrics` that are not served, and why. A sum over partitions is not served either."""
SUMS = ("lag", "in_flight", "open_groups", "held_bytes")
"""Names that a grouping process also reports without a partition, as sums; Prometheus can sum the served metrics."""


def of_role(role: str) -> tuple[MetricSpec, ...]:
    """Return the metrics that a role serves."""
    return tuple(spec for spec in CATALOGUE_OF_METRICS if role in spec.roles)
