"""`rollstream run`: every role of a run under one supervisor, until it is told to stop or the learner finishes.

The broker is not part of it: it must be there. Ending, for whatever reason, stops producers first, then drains what
they wrote, then the learner; nothing it started is left.
"""

import argparse
import logging
import signal

from pipeline import plan as plans
from pipeline.config import RunConfig
from pipeline.lengths import check_lengths
from pipeline.plan import LEARN, RunPlan
from pipeline.process import Interrupted, Interrupts, announce_ready
from pipeline.provision import provision
from pipeline.roles.jax_runtime import require_jax
from pipeline.supervisor import Supervisor
from producers.tasks import create_task
from topics.logs import event

logger = logging.getLogger(__name__)


def run(config: RunConfig, args: argparse.Namespace) -> int:
    """Run until SIGTERM (0), Ctrl-C (130), the learner's last step (0) or a role that keeps failing (1)."""
    require_jax()
    check_lengths(config, create_task(config.task, config.tasks))
    interrupts = Interrupts()
    interrupts.install()
    try:
        provision(config)
        config = plans.settle(config)
        roles = plans.plan(config, plans.write(config))
        log_dir = config.run_dir / "logs"
        with Supervisor(log_dir, interrupts=interrupts, environment=plans.child_environment(config)) as supervisor:
            interrupts.kill_now = supervisor.kill_all
            start(supervisor, roles)
            print(f"run {config.run}: {len(supervisor.pids)} processes are ready; their logs: {log_dir}", flush=True)
            announce_ready()
            while not supervisor.finished(LEARN):
                supervisor.poll(0.5)
            print(f"run {config.run}: the learner has made its last step", flush=True)
    except Interrupted as interrupted:
        if interrupted.signal_number != signal.SIGTERM:
            raise
        event(logger, "stopped", signal="SIGTERM")
    return 0


def start(supervisor: Supervisor, roles: RunPlan) -> None:
    """Start what consumes, and once all of it is ready what produces."""
    supervisor.start(*roles.consumers)
    supervisor.wait_ready(spec.name for spec in roles.consumers)
    supervisor.start(*roles.workers, *roles.evaluators)
    supervisor.wait_ready(spec.name for spec in (*roles.workers, *roles.evaluators))
