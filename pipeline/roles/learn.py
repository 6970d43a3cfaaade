"""The role `learn`: one learner, warm-started on what the task teaches of its format."""

import argparse
import os
import sys
import threading

from pipeline.config import RunConfig
from pipeline.lengths import check_lengths
from pipeline.process import announce_progress, announce_ready, stop_on_signals
from pipeline.roles.jax_runtime import prepare_jax
from pipeline.warm_start import warm_start_examples
from producers.tasks import create_task
from topics import clients
from topics.errors import RollstreamError


def run(config: RunConfig, args: argparse.Namespace) -> int:
    """Train until the last step or until the lead is told to stop; a checkpoint is on disk afterwards."""
    check_lengths(config, create_task(config.task, config.tasks))
    clients.check_broker(config.kafka)
    prepare_jax(config)
    from consumers.learner.learner import learn
    from consumers.learner.team import join

    stop = threading.Event()

    def ready() -> None:
        # Before its first step is on record there is nothing to drain, and a signal ends the process at once.
        stop_on_signals(stop)
        announce_ready()

    team = join(config.learner, args.process)
    try:
        learn(
            config.learner,
            config.kafka,
            config.run,
            warm_start_examples=lambda: warm_start_examples(config),
            stop=stop,
            team=team,
            on_ready=ready,
            on_progress=announce_progress,
        )
    except RollstreamError as error:
        if team.processes > 1 and not args.debug:
            # At exit JAX waits for the other processes, which wait for this one or are gone.
            print(f"rollstream: {error}", file=sys.stderr, flush=True)
            os._exit(error.exit_code)
        raise
    return 0
