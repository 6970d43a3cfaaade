"""`rollstream run`: every role of a run under one supervisor, until it is told to stop or has done its work.

The broker is not part of it: it must be there. Ending, for whatever reason, stops producers first, then drains what
they wrote, then the learner; nothing it started is left.
"""

import argparse
import logging
import signal
import sys
import time
from contextlib import ExitStack, closing

from pipeline import control_run
from pipeline import plan as plans
from pipeline.config import RunConfig
from pipeline.display import Display
from pipeline.lengths import check_lengths
from pipeline.observer import RunObserver
from pipeline.plan import LEARN, RunPlan
from pipeline.process import Interrupted, Interrupts, announce_ready
from pipeline.provision import provision
from pipeline.roles.jax_runtime import require_jax
from pipeline.stall import StallWatch
from pipeline.supervisor import Supervisor
from pipeline.tools.top import NEWEST, line
from pipeline.workspace import log_to
from producers.tasks import create_task
from topics.errors import RollstreamError
from topics.logs import event

logger = logging.getLogger(__name__)
_LINE_S = 10.0
"""How often a run is told of where there is no terminal: it goes on for days."""


def run(config: RunConfig, args: argparse.Namespace) -> int:
    """Run until SIGTERM (0), Ctrl-C (130), the end of its work (0) or a role that keeps failing (1)."""
    if not config.is_control:
        require_jax()
        check_lengths(config, create_task(config.task, config.tasks))
    interrupts = Interrupts()
    interrupts.install()
    try:
        provision(config)
        config = plans.settle(config)
        path = plans.write(config)
        log_dir = config.run_dir / "logs"
        with Supervisor(log_dir, interrupts=interrupts, environment=plans.child_environment(config)) as supervisor:
            interrupts.kill_now = supervisor.kill_now
            if config.is_control:
                control = plans.control_plan(config, path)
                control_run.start(supervisor, control)
                _say_ready(config, supervisor)
                control_run.watch(config, supervisor, control)
                print(f"run {config.run}: what was collected is on the log, labelled and filled in", flush=True)
            else:
                start(supervisor, plans.plan(config, path))
                _say_ready(config, supervisor)
                watch(config, supervisor, interrupts)
                print(f"run {config.run}: the learner has made its last step", flush=True)
    except Interrupted as interrupted:
        if interrupted.signal_number != signal.SIGTERM:
            raise
        event(logger, "stopped", signal="SIGTERM")
    return 0


def _say_ready(config: RunConfig, supervisor: Supervisor) -> None:
    logs = supervisor.log_dir
    print(f"run {config.run}: {len(supervisor.pids)} processes are ready; their logs: {logs}", flush=True)
    announce_ready()


def start(supervisor: Supervisor, roles: RunPlan) -> None:
    """Start what consumes, and once all of it is ready what produces."""
    supervisor.start(*roles.consumers)
    supervisor.wait_ready(spec.name for spec in roles.consumers)
    supervisor.start(*roles.workers, *roles.evaluators)
    supervisor.wait_ready(spec.name for spec in (*roles.workers, *roles.evaluators))


def watch(config: RunConfig, supervisor: Supervisor, interrupts: Interrupts) -> None:
    """Show how the run goes, and warn where it stands still, until the learner has made its last step."""
    display = Display(
        json=False,
        began=time.monotonic(),
        newest=NEWEST,
        line=lambda seen: line(seen.snapshot(NEWEST)),
        every_s=_LINE_S,
    )

    def kill_now() -> None:
        display.restore()
        supervisor.kill_now()

    interrupts.kill_now = kill_now
    if sys.stdout.isatty():
        # Where the frame is drawn no log can be.
        log_to(supervisor.log_dir / "run.log", config.log_level)
    stall = StallWatch(config)
    with ExitStack() as stack:
        observer: RunObserver | None = stack.enter_context(closing(RunObserver(config.kafka, config.run, keep=NEWEST)))
        stack.enter_context(display.live())
        while not supervisor.finished(LEARN):
            supervisor.poll(0.25)
            if observer is None:
                continue
            try:
                observer.poll(0.25)
                display.show(observer)
                seen = observer.snapshot(NEWEST)
                # While history is read, nothing is known of what goes on.
                for warning in () if seen.history_left else stall.look(seen, time.monotonic()):
                    display.say(warning)
            except RollstreamError as error:
                # Training needs nobody who watches.
                display.say(f"{error}; the run goes on, and is no longer shown: see `rollstream top`")
                observer = None
