"""The role `learn`: one learner, warm-started on the environments' examples of their formats."""

import argparse
import threading
from typing import TYPE_CHECKING

from rollstream.pipeline.command_line.command_parser import Setting, set_handler
from rollstream.pipeline.command_line.process_number import add_number
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.roles.busy_progress import BusyProgress
from rollstream.pipeline.run.broker_wait import wait_for_broker
from rollstream.pipeline.run.jax_runtime import ending_at_once, prepare_jax
from rollstream.pipeline.run.length_checks import check_lengths
from rollstream.pipeline.run.role_process import TERMINATED, announce_ready, stop_on_signals
from rollstream.pipeline.run.run_environments import environments_of
from rollstream.pipeline.run.warm_start import warm_start_examples

if TYPE_CHECKING:
    from rollstream.consumers.learner.parallel.team import Team

_STOPPED = "stopped"


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream role learn`."""
    set_handler(parser, run, role=True)
    add_number(parser, "process of learner.processes", "--process")
    parser.add_argument(
        "--warm-start",
        dest="learner.warm_start.file=",
        action=Setting,
        metavar="FILE",
        help="supervised examples to train on before version 0",
    )


def run(config: RunConfig, args: argparse.Namespace) -> int:
    """Train until the last step, or until the lead process is stopped, and write a checkpoint. The exit code is
    TERMINATED after a stop."""
    check_lengths(config, environments_of(config))
    wait_for_broker(config.kafka)
    prepare_jax(config)
    from rollstream.consumers.learner.learner import learn
    from rollstream.consumers.learner.parallel.team import join

    stop = threading.Event()
    team = join(config.learner, args.process)
    with BusyProgress() as progress, ending_at_once(team.processes, args.debug):

        def ready() -> None:
            progress.close()
            # Before the role is ready there is nothing to drain, so a signal ends the process at once.
            stop_on_signals(stop)
            announce_ready()

        learn(
            config.learner,
            config.kafka,
            config.run,
            warm_start_examples=lambda: warm_start_examples(config),
            stop=stop,
            team=team,
            on_ready=ready,
            on_progress=progress,
        )
        stopped = _shared(team, stop.is_set())
    return TERMINATED if stopped else 0


def _shared(team: "Team", stopped: bool) -> bool:
    """Return the lead's `stopped` in every process, because all of them must start again if the lead does."""
    if team.process:
        return team.receive(_STOPPED) == b"yes"
    team.publish(_STOPPED, b"yes" if stopped else b"no")
    return stopped
