"""The role `learn`: one learner, warm-started on the environments' examples of their formats."""

import argparse
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rollstream.consumers.models.tokenizer_log import put_tokenizer
from rollstream.pipeline.command_line.command_parser import Setting, set_handler
from rollstream.pipeline.command_line.process_number import add_number
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.process.role_process import TERMINATED, announce_progress, announce_ready, stop_on_signals
from rollstream.pipeline.run.broker_wait import wait_for_broker
from rollstream.pipeline.run.jax_runtime import ending_at_once, prepare_jax
from rollstream.pipeline.run.learner_start import check_lengths, warm_start_examples
from rollstream.pipeline.run.run_environments import environments_of
from rollstream.topics.closing import Closing

if TYPE_CHECKING:
    from rollstream.consumers.learner.parallel.team import Team

_EVERY_S = 10.0
_LEAST_SHARE = 0.02
"""Processor time, as a share of the time that passed, from which on a process computes; one that waits uses less."""


class BusyProgress(Closing):
    """Reports progress, and repeats the last report every `every_s` seconds in which this process computed.

    A process that waits for something uses no processor time, so its supervisor still notices its silence.
    """

    def __init__(
        self,
        report: Callable[[str], object] = announce_progress,
        *,
        every_s: float = _EVERY_S,
        processor_s: Callable[[], float] = time.process_time,
    ) -> None:
        """Start a thread that looks every `every_s` seconds at the seconds of processor time used so far."""
        self._report, self._every_s, self._processor_s = report, every_s, processor_s
        self._last = "starting"
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="busy progress", daemon=True)
        self._thread.start()

    def __call__(self, what: str) -> None:
        """Report progress."""
        self._last = what
        self._report(what)

    def close(self) -> None:
        """End the repetition; call this before the process reports that it is ready, which closes the pipe."""
        self._closed.set()
        self._thread.join()

    def _repeat(self) -> None:
        start = used = self._processor_s()
        while not self._closed.wait(self._every_s):
            before, used = used, self._processor_s()
            if used - before >= _LEAST_SHARE * self._every_s:
                self._report(f"{self._last}, {used - start:.0f} s of processor time so far")


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
    wait_for_broker(config)
    if args.process == 0:
        put_tokenizer(config.kafka, config.run, config.learner.pretrained)
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
