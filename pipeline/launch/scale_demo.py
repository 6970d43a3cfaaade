"""`rollstream demo --scale`: the autoscaler adds and removes grouping processes as their load changes.

Synthetic workers write rollouts faster than one grouping process can read them, and no learner reads the batches.
Processes, Kafka and records are real. However the demo ends, no process that it started remains.
"""

import argparse
import json
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

from rollstream.consumers.grouping.config import AutoscaleConfig
from rollstream.consumers.grouping.process.mark_writer import drain
from rollstream.consumers.trainers.step_writer import publish_version
from rollstream.pipeline.audit.ledger import ledger
from rollstream.pipeline.audit.verification import verify
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.deployment.description import GROUP
from rollstream.pipeline.deployment.scaling import bounds
from rollstream.pipeline.launch.scale_report import ScaleReport
from rollstream.pipeline.launch.scale_series import ScalePoint, ScaleSeries, append_times, coverage, handovers, readings
from rollstream.pipeline.launch.synthetic_load import SyntheticWorkers, duration_s
from rollstream.pipeline.process.role_process import Interrupted, Interrupts
from rollstream.pipeline.run import plan as plans
from rollstream.pipeline.run import workspace
from rollstream.pipeline.run.autoscaling import GroupScaler, at_first
from rollstream.pipeline.run.display import Display
from rollstream.pipeline.run.plan import ServicePorts
from rollstream.pipeline.run.supervisor import Supervisor
from rollstream.pipeline.tools.top import sparkline
from rollstream.topics.errors import ConfigurationError, DeadlineExceeded

PICTURE = "scale.html"
_POINT_S = 1.0
"""Time between two points of the series."""
_SETTLED_POINTS = 3
"""Points to take once the number of processes is back at its minimum, so that the picture shows the end."""
StartKafka = Callable[[RunConfig, bool, ExitStack, Callable[[str], None]], RunConfig]


def run(config: RunConfig, args: argparse.Namespace, start_kafka: StartKafka) -> int:
    """Run the demo; return 0 if processes were added and removed, and every rollout was read once and is
    accounted for, else 1."""
    began = time.monotonic()
    if not config.grouper.autoscale.enabled:
        raise ConfigurationError("grouper.autoscale.enabled is false, but this demo shows autoscaling; set it to true")
    interrupts = Interrupts()
    interrupts.install()
    with workspace.prepared(config) as placed:
        return _demo(at_first(placed), args, start_kafka, interrupts, began)


def _demo(
    config: RunConfig, args: argparse.Namespace, start_kafka: StartKafka, interrupts: Interrupts, began: float
) -> int:
    """Run the demo in its folder. `began` is its start on the monotonic clock, in seconds."""
    workspace.log_to(config.run_dir / "logs" / "demo.log", config.log_level)
    display: Display[ScaleSeries] = Display(json=args.json, began=began, line=_line, frame=_frame)
    with ExitStack() as stack:
        stack.callback(workspace.leave, config, keep=args.keep)
        try:
            config = start_kafka(config, args.keep, stack, display.say)
            # Grouping waits for the policy version of the rollouts, so publish it, though it has no weights.
            publish_version(config.kafka, config.run, learner="synthetic")
            series, written = _scale(config, stack, interrupts, display)
            display.say("checking: ledger, verification of every batch, how often each offset was read")
            report = _examine(config, series, written, kept=args.keep, began=began)
        except Interrupted as interrupted:
            display.say(f"{interrupted}: stopping what was started")
            raise
    (config.run_dir / PICTURE).write_text(report.as_page(), encoding="utf-8")
    workspace.write_report(config, report.as_dict())
    print(json.dumps(report.as_dict()) if args.json else f"\n{report.as_text()}", flush=True)
    return 0 if report.passed else 1


def _scale(
    config: RunConfig, stack: ExitStack, interrupts: Interrupts, display: Display[ScaleSeries]
) -> tuple[ScaleSeries, int]:
    """Run the load until processes are back at their minimum; return the series and the number of rollouts written."""
    path = plans.write(config)
    ports = ServicePorts(config)
    supervisor = stack.enter_context(
        Supervisor(
            config.run_dir / "logs",
            interrupts=interrupts,
            environment=plans.child_environment(config),
            place=ports.place,
        )
    )

    def kill_now() -> None:
        display.restore()
        supervisor.kill_now()

    interrupts.kill_now = kill_now
    groupers = plans.plan(config, path).of(GROUP)
    display.say(f"starting grouping: {len(groupers)} of up to {bounds(*_rule(config))[1]} processes; {_limit(config)}")
    supervisor.start(*groupers)
    supervisor.wait_ready(spec.name for spec in groupers)
    load = config.demo.scale
    scaler = stack.enter_context(closing(GroupScaler(config, path, supervisor, ports)))
    workers = stack.enter_context(SyntheticWorkers(config.kafka, config.run, load, config.seed))
    display.say(
        f"{load.workers} synthetic workers write {load.low_per_s:,.0f} to {load.high_per_s:,.0f} rollouts per second"
    )
    series = _watch(config, supervisor, scaler, workers, display)
    written = workers.stop()
    display.say(f"{written:,} rollouts written; draining")
    drain(config.kafka, config.run, config.grouper, timeout_s=load.patience_s)
    supervisor.stop_all()
    return series, written


def _watch(
    config: RunConfig,
    supervisor: Supervisor,
    scaler: GroupScaler,
    workers: SyntheticWorkers,
    display: Display[ScaleSeries],
) -> ScaleSeries:
    """Take points until the load is over and the number of processes is back at its minimum.

    Raises DeadlineExceeded if more processes remain after demo.scale.patience_s.
    """
    load = config.demo.scale
    least, _most = bounds(*_rule(config))
    series, began, settled = ScaleSeries(), time.monotonic(), 0
    over_s = duration_s(load)
    with display.live():
        while settled < _SETTLED_POINTS:
            supervisor.poll(0.1)
            workers.check()
            before = scaler.processes
            scaler.poll()
            if scaler.processes != before:
                display.say(f"{scaler.gauges.lag:,} records wait: {before} -> {scaler.processes} grouping processes")
            at_s = time.monotonic() - began
            if at_s >= len(series.points) * _POINT_S:
                series = series.with_point(_point(at_s, supervisor, scaler, workers))
                newest = series.points[-1]
                settled += at_s > over_s and newest.processes == newest.wanted == least and scaler.settled
            display.show(series)
            if at_s > over_s + load.patience_s:
                raise DeadlineExceeded(
                    f"{scaler.processes} grouping processes are left {load.patience_s:g} s after the load was low "
                    f"again, with {scaler.gauges.lag:,} records waiting; see {supervisor.log_dir}"
                )
    return series


def _point(at_s: float, supervisor: Supervisor, scaler: GroupScaler, workers: SyntheticWorkers) -> ScalePoint:
    return ScalePoint(
        at_s=round(at_s, 3),
        produced=workers.written,
        read=scaler.gauges.position,
        lag=scaler.gauges.lag,
        processes=sum(supervisor.is_ready(name) for name in supervisor.pids),
        wanted=scaler.processes,
    )


def _examine(config: RunConfig, series: ScaleSeries, written: int, *, kept: bool, began: float) -> ScaleReport:
    """Build the report from the topics."""
    rule, partitions = _rule(config)
    done = readings(config.kafka, config.run)
    places: dict[str, Any] = workspace.places(config, kept=kept)
    del places["checkpoints"]
    again = ("rollstream demo --scale --keep", f"rollstream demo --scale --seed {config.seed + 1}")
    return ScaleReport(
        run=config.run,
        seed=config.seed,
        partitions=partitions,
        limit_per_s=config.grouper.records_per_s,
        high_per_s=config.demo.scale.high_per_s,
        fewest=bounds(rule, partitions)[0],
        rule=(
            f"Autoscaling: every {rule.interval_s:g} s, one process per {rule.lag_per_process:,} waiting records; "
            f"a process that was not needed for {rule.cooldown_s:g} s is removed."
        ),
        written=written,
        series=series,
        coverage=coverage(done),
        handovers=tuple(handovers(done, append_times(config.kafka, config.run))),
        ledger=ledger(config.kafka, config.run).as_dict(),
        verify=verify(config.kafka, config.run, config.grouper.makers, estimators=config.grouper.estimators).as_dict(),
        seconds=round(time.monotonic() - began, 1),
        kept=kept,
        places={"picture": str(config.run_dir / PICTURE), **places},
        next=workspace.next_commands(config, kept=True) if kept else again,
    )


def _rule(config: RunConfig) -> tuple[AutoscaleConfig, int]:
    return config.grouper.autoscale, config.topics.partitions


def _limit(config: RunConfig) -> str:
    limit = config.grouper.records_per_s
    return f"each may read {limit:,.0f} records per second (grouper.records_per_s)" if limit else "without a limit"


def _line(series: ScaleSeries) -> str:
    if not series.points:
        return "nothing measured yet"
    newest = series.points[-1]
    return (
        f"lag {newest.lag:6,}   processes {newest.processes} of {newest.wanted} wanted   "
        f"written {series.produced_per_s[-1]:6,.0f}/s   read {series.read_per_s[-1]:6,.0f}/s"
    )


def _frame(series: ScaleSeries, width: int) -> str:
    """Return a line for each series: its name, its newest value and its course."""
    curves = [curve for curves in series.panels.values() for curve in curves.items()]
    return "\n".join(
        f"{name:16} {values[-1] if values else 0:8,.0f} {sparkline(values, width - 26)}" for name, values in curves
    )
