"""`rollstream run`: starts every role of a run under one supervisor, until it is stopped or its work is done.

The command does not start the broker, which must be running. When it ends, it stops the roles in the reverse order of
their starts, so the producers first and the learner last; after Ctrl-C, it stops all of them at once. No process that
it started remains: after kill -9, the processes end unless another `rollstream run` adopts them in time.
"""

import argparse
import logging
import signal
import sys
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

from rollstream.pipeline.command_line.command_parser import set_handler
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.control.steering import answer, put_back
from rollstream.pipeline.deployment.description import ENV, GROUP, LEARN
from rollstream.pipeline.process.role_process import Interrupted, Interrupts, announce_ready
from rollstream.pipeline.run import control_run
from rollstream.pipeline.run import plan as plans
from rollstream.pipeline.run.autoscaling import GroupScaler, at_first
from rollstream.pipeline.run.diagnoses import LoopWatch
from rollstream.pipeline.run.display import Display
from rollstream.pipeline.run.jax_runtime import require_jax
from rollstream.pipeline.run.learner_start import check_lengths
from rollstream.pipeline.run.observer import RunObserver
from rollstream.pipeline.run.plan import RunPlan, ServicePorts
from rollstream.pipeline.run.process_registry import ProcessRegistry
from rollstream.pipeline.run.run_environments import environments_of
from rollstream.pipeline.run.run_lease import RunLease
from rollstream.pipeline.run.stall_watch import StallWatch
from rollstream.pipeline.run.start_stages import StartStages
from rollstream.pipeline.run.steered_processes import SteeredProcesses, begin_with
from rollstream.pipeline.run.supervisor import Supervisor
from rollstream.pipeline.run.workspace import log_to
from rollstream.pipeline.tools.top import NEWEST, frame, line
from rollstream.pipeline.tools.topics import provision
from rollstream.pipeline.ui.run_page import RunPage
from rollstream.topics.control.steering import DesiredState, SteeringFollower
from rollstream.topics.errors import RollstreamError
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)
_LINE_S = 10.0
"""Time between progress lines without a terminal; runs may take days."""
_WITHDRAW = "`rollstream steer stop --withdraw` lets the run go on"


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream run`."""
    set_handler(parser, run, example="rollstream run run.toml", role=True)
    parser.add_argument("file", type=Path, nargs="?", metavar="run.toml", help="the same as --config")
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="supervise the run although it is supervised elsewhere; that `rollstream run` ends, with its processes",
    )


def run(config: RunConfig, args: argparse.Namespace) -> int:
    """Run until SIGTERM (exit code 0), Ctrl-C (130), the end of the run's work (0), a role that keeps failing (1) or
    another `rollstream run` that takes over (3)."""
    if not config.is_control:
        require_jax()
        plans.check_labeler(config)
        check_lengths(config, environments_of(config))
    interrupts = Interrupts()
    interrupts.install()
    try:
        provision(config)
        with (
            closing(SteeringFollower(config.kafka, config.run)) as following,
            ProcessRegistry(
                config.run_dir / "processes",
                plans.digest(config),
                adoption_s=config.supervisor.adoption_s,
                stop_timeout_s=config.supervisor.stop_timeout_s,
            ) as registry,
            RunLease(
                config.kafka,
                config.run,
                following,
                directory=config.run_dir,
                adoption_s=config.supervisor.adoption_s,
                previous=registry.previous,
                take_over=args.take_over,
            ) as lease,
        ):
            _supervise(config, interrupts, following, registry, lease)
    except Interrupted as interrupted:
        if interrupted.signal_number != signal.SIGTERM:
            raise
        event(logger, "stopped", signal="SIGTERM")
    return 0


def _supervise(
    config: RunConfig,
    interrupts: Interrupts,
    following: SteeringFollower,
    registry: ProcessRegistry,
    lease: RunLease,
) -> None:
    """Start or adopt every process, and watch them until the work is done."""
    # Processes that a previous supervisor started keep the configuration that it wrote for them.
    orphans = frozenset(registry.orphans)
    config, path = plans.settled_again(config) if orphans else plans.settled(config)
    grouping = sum(name.startswith(f"{GROUP}-") for name in orphans)
    first = at_first(config, grouping) if config.grouper.autoscale.enabled else config
    running = begin_with(first, following.state, orphans)
    ports = ServicePorts(config, resumed=bool(orphans))
    stages = StartStages(config.data_dir / "cache")
    with Supervisor(
        config.run_dir / "logs",
        interrupts=interrupts,
        environment=plans.child_environment(config),
        on_progress=stages.note,
        place=ports.place,
        may_end=lambda kind: _may_end(kind, following.state),
        registry=registry,
        check=lease.check,
    ) as supervisor:

        def kill_now() -> None:
            stages.restore()
            supervisor.kill_now()

        interrupts.kill_now = kill_now
        if sys.stdout.isatty():
            # Frames take the whole terminal, so logs go to a file.
            log_to(supervisor.log_dir / "run.log", config.log_level)
        roles = plans.plan(running, path)
        page = RunPage(config, path, supervisor)
        start(supervisor, roles, stages)
        registry.end_orphans()
        _say_adopted(config, supervisor, orphans)
        _say_ready(config, supervisor, ports)
        if config.is_control:
            control_run.watch(config, supervisor, roles, lambda: page.tell(partial(print, flush=True)))
            print(f"run {config.run}: everything that was collected is labeled and filled in", flush=True)
            return

        def steer(say: Callable[[str], None], stack: ExitStack) -> Steer:
            scaler = None
            if config.grouper.autoscale.enabled:
                scaler = stack.enter_context(closing(GroupScaler(running, path, supervisor, ports, say=say)))
            keep = partial(put_back, config.kafka, config.run)
            answer_to = partial(answer, config.kafka, config.run)
            steered = SteeredProcesses(
                config, running, path, supervisor, ports, scaler=scaler, say=say, put_back=keep, answer=answer_to
            )
            return Steer(following, steered, scaler, say)

        watch(config, supervisor, interrupts, steer, page)
        print(f"run {config.run}: the learner has made its last step{_why(following)}", flush=True)


def _may_end(kind: str, wanted: DesiredState) -> bool:
    """Whether processes of a kind may end because the run is being drained."""
    return (kind == ENV and wanted.draining) or (kind == GROUP and wanted.drained)


def _why(following: SteeringFollower) -> str:
    if following.state.drained:
        return f", as `rollstream steer stop --drain` asked, with nothing in flight; {_WITHDRAW}"
    last = following.state.last_step
    return "" if last is None else f", as `rollstream steer stop --at-step {last}` asked; {_WITHDRAW}"


class Steer:
    """Adjusts the processes of a run to the numbers that operators set or that the lag of grouping requires."""

    def __init__(
        self,
        following: SteeringFollower,
        steered: SteeredProcesses,
        scaler: GroupScaler | None,
        say: Callable[[str], None],
    ) -> None:
        self._following, self._steered, self._scaler, self._say = following, steered, scaler, say

    def poll(self) -> None:
        """Apply the numbers that are wanted now. Call it often."""
        self._steered.poll(self._following.state)
        if self._scaler is None:
            return
        before = self._scaler.processes
        self._scaler.poll()
        if self._scaler.processes != before:
            why = (
                f"{self._scaler.gauges.lag:,} records wait"
                if self._scaler.manual is None
                else "as `rollstream steer scale` asked"
            )
            self._say(f"grouping has {self._scaler.processes} processes instead of {before}: {why}")


def _say_ready(config: RunConfig, supervisor: Supervisor, ports: ServicePorts) -> None:
    logs = supervisor.log_dir
    print(f"run {config.run}: {len(supervisor.pids)} processes are ready; their logs: {logs}", flush=True)
    if config.service.port:
        print(f"run {config.run}: their service ports: {ports.path}", flush=True)
    announce_ready()


def _say_adopted(config: RunConfig, supervisor: Supervisor, orphans: Collection[str]) -> None:
    """Report how many processes were adopted from a previous supervisor."""
    if orphans:
        print(
            f"run {config.run}: {len(supervisor.adopted)} of {len(supervisor.pids)} processes go on from a previous "
            "`rollstream run` that was killed",
            flush=True,
        )


def start(supervisor: Supervisor, roles: RunPlan, stages: StartStages) -> None:
    """Start the consumers, then, once all of them are ready, the producers."""
    for specs in (roles.consumers, roles.producers):
        stages.start(supervisor, *specs)


def watch(
    config: RunConfig,
    supervisor: Supervisor,
    interrupts: Interrupts,
    steer: Callable[[Callable[[str], None], ExitStack], Steer],
    page: RunPage,
) -> None:
    """Show progress, follow commands, and warn if the run stalls, until the learner has made its last step."""
    display: Display[RunObserver] = Display(
        json=False,
        began=time.monotonic(),
        line=lambda observer: line(observer.snapshot(NEWEST)),
        frame=lambda observer, width: frame(observer.snapshot(NEWEST), width),
        every_s=_LINE_S,
    )

    def kill_now() -> None:
        display.restore()
        supervisor.kill_now()

    interrupts.kill_now = kill_now
    stall = StallWatch(config)
    with ExitStack() as stack:
        group = config.labeling.group_id(config.run)
        observer: RunObserver | None = stack.enter_context(
            closing(
                RunObserver(
                    config.kafka,
                    config.run,
                    keep=NEWEST,
                    labeling_group=group,
                    step_patience_s=config.supervisor.step_patience_s,
                )
            )
        )
        steering = steer(display.say, stack)
        loops = LoopWatch(config.run)
        stack.enter_context(display.live())
        try:
            while not supervisor.finished(LEARN):
                supervisor.poll(0.25)
                page.tell(display.say)
                steering.poll()
                for warning in loops.look(supervisor.crash_loops):
                    display.say(warning)
                if observer is None:
                    continue
                try:
                    observer.poll(0.25)
                    display.show(observer)
                    for warning in stall.look(observer.snapshot(NEWEST), time.monotonic()):
                        display.say(warning)
                except RollstreamError as error:
                    # Training goes on without an observer.
                    display.say(f"{error}; the run goes on, and is no longer shown: see `rollstream top`")
                    observer = None
        except Interrupted:
            reached = "" if observer is None else f"{line(observer.snapshot(NEWEST))}; "
            display.say(
                f"stopping: {reached}logs and checkpoints lie in {config.run_dir}, and the same command goes on"
            )
            raise
