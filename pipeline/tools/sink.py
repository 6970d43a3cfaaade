"""`rollstream sink`: fills a tracker, such as trackio, with the steps of a learner and traces of its rollouts."""

import argparse
import json
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rollstream.consumers.archive.log_source import ArchiveSource, LogSource, TopicSource
from rollstream.consumers.trackers.step_feed import StepFeed
from rollstream.consumers.trackers.tracker import TrackedRun, Tracker, open_tracker
from rollstream.pipeline.command_line.command_parser import Setting, set_handler, wait_seconds
from rollstream.pipeline.command_line.plain_values import tell
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.process.role_process import announce_ready, stop_on_signals
from rollstream.pipeline.run.broker_wait import wait_for_broker
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.files.stores import open_store
from rollstream.topics.heartbeats import beat
from rollstream.topics.secrets import resolve_options


class _Result(NamedTuple):
    """Steps and traces written after one read of the log."""

    steps: int
    traces: int
    missing_rollouts: int
    """Rollouts that were drawn for traces but are no longer on the log."""
    newest_step: int
    """The newest step that the tracker holds."""


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream sink`."""
    set_handler(
        parser,
        fill_tracker,
        example="rollstream sink --run main --to trackio --follow",
        json=True,
        role=True,
        serves=lambda args: bool(args.follow),
    )
    parser.add_argument(
        "--to",
        dest="tracker.to=",
        action=Setting,
        metavar="TRACKER",
        help="trackio, wandb, tensorboard, jsonl, or package.module:Class (default: tracker.to)",
    )
    parser.add_argument(
        "--into", dest="tracker.directory=", action=Setting, metavar="DIR", help="directory of the tracker's files"
    )
    parser.add_argument("--learner", metavar="NAME", help="a learner of the run (default: learner.name)")
    parser.add_argument("--archive", metavar="ARCHIVE", help="read an archive instead of the topics")
    parser.add_argument("--follow", action="store_true", help="go on until stopped, as `rollstream run` does")
    parser.add_argument(
        "--every", type=wait_seconds, default=5.0, metavar="S", help="seconds between two reads (default: %(default)g)"
    )


def fill_tracker(config: RunConfig, args: argparse.Namespace) -> int:
    """Write the steps that the tracker does not have yet, repeatedly with --follow until stopped."""
    stop = threading.Event()
    if args.follow:
        stop_on_signals(stop)
        if args.archive is None:
            wait_for_broker(config)
    log_of: Callable[[str], LogSource] = partial(TopicSource, config.kafka)
    if args.archive is not None:
        log_of = partial(ArchiveSource, open_store(args.archive))
    learner = args.learner or config.learner.name
    with StepFeed(log_of, config.run, learner, config.tracker.traces) as feed:
        if args.follow:
            announce_ready()
            newest_step = _first_step(feed, stop, args.every)
            if newest_step < 0:
                return 0
        else:
            newest_step = _newest_step(feed, config.run, learner)
        tracked = TrackedRun(
            run=config.run,
            learner=learner,
            newest_step=newest_step,
            directory=Path(config.tracker.directory or config.data_dir / "trackers"),
            config=replace(config.tracker, options=resolve_options("tracker.options", config.tracker.options)),
        )
        tracker = open_tracker(tracked)
        with closing(tracker):
            above = tracker.last
            while True:
                beat("sink")
                # What is recorded before the stop is written after it.
                last = stop.is_set() or not args.follow
                result = _fill(feed, tracker, above)
                above = result.newest_step
                if result.steps or not args.follow:
                    _print(result, tracked, args.json)
                if last:
                    break
                stop.wait(args.every)
        tell(feed.skipped)
        return 0


def _newest_step(feed: StepFeed, run: str, learner: str) -> int:
    """Return the newest step on record. Raises ConfigurationError if there is none."""
    newest = feed.newest_step()
    if newest < 0:
        others = ", ".join(sorted(feed.learners)) or "none"
        raise ConfigurationError(
            f"learner {learner} of run {run} has no step on record; learners with steps: {others}; name one with "
            "--learner, or wait for the first step with --follow"
        )
    return newest


def _first_step(feed: StepFeed, stop: threading.Event, every_s: float) -> int:
    """Wait for a step on record, and return the newest; -1 if there is none once `stop` is set."""
    while (newest := feed.newest_step()) < 0 and not stop.wait(every_s):
        beat("sink")
    return newest


def _fill(feed: StepFeed, tracker: Tracker, above: int) -> _Result:
    """Write the steps after step `above`."""
    newest, steps, traces, missing = above, 0, 0, feed.missing_rollouts
    for step in feed.steps(above):
        beat("sink")
        tracker.write(step)
        newest, steps, traces = step.step, steps + 1, traces + len(step.traces)
    return _Result(steps, traces, feed.missing_rollouts - missing, newest)


def _print(result: _Result, tracked: TrackedRun, as_json: bool) -> None:
    to = tracked.config.to
    if as_json:
        subject = {"tracker": to, "run": tracked.run, "learner": tracked.learner}
        print(json.dumps({**subject, **result._asdict()}), flush=True)
        return
    gone = (
        f"; {result.missing_rollouts} rollouts drawn for traces are no longer on the log"
        if result.missing_rollouts
        else ""
    )
    print(
        f"{result.steps} steps and {result.traces} traces are new in {to}, which has {tracked.run}/{tracked.learner} "
        f"up to step {result.newest_step}{gone}",
        flush=True,
    )
