"""`rollstream demo`: the whole loop on a local Kafka, until the model has learned its task; then the books are checked.

Every part is a process of its own, started and stopped here. Whatever ends the demo, Ctrl-C included, nothing it
started is left running.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

from consumers.grouping.marks import drain
from consumers.weights.publisher import read_manifests
from infra.broker import open_broker
from pipeline import plan as plans
from pipeline import provision, workspace
from pipeline.config import RunConfig
from pipeline.evaluation import evaluate
from pipeline.ledger import ledger
from pipeline.observer import RunObserver
from pipeline.plan import LEARN
from pipeline.process import Interrupted, Interrupts
from pipeline.report import DemoReport, Evaluation
from pipeline.roles.jax_runtime import require_jax
from pipeline.supervisor import Supervisor
from pipeline.verify import verify
from producers.tasks import create_task
from topics import clients
from topics.catalogue import CATALOGUE, topic_name
from topics.config import KafkaConfig

TARGET_EXACT = 0.9
WINDOW = 1000
"""Rollouts whose mean decides, and is reported at start and end."""
_EVERY_S = 2.0

Say = Callable[[str], None]


@dataclass(frozen=True)
class Played:
    """What training left behind."""

    first: Evaluation
    last: Evaluation
    observer: RunObserver
    outcome: str
    seconds: float


def run(config: RunConfig, args: argparse.Namespace) -> int:
    """Play the demo; 0 when it learned, the ledger balances and every batch follows from the log, else 1."""
    began = time.monotonic()
    require_jax()
    create_task(config.task)
    interrupts = Interrupts()
    interrupts.install()
    base = config.data_dir
    workspace.forget_earlier(base)
    config = workspace.prepare(config)
    workspace.log_to(config.run_dir / "logs" / "demo.log", config.log_level)

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {line}", file=sys.stderr if args.json else sys.stdout, flush=True)

    with ExitStack() as stack:
        stack.callback(workspace.leave, config, keep=args.keep)
        try:
            config = start_kafka(config, args.keep, stack, say)
            played = play(config, stack, interrupts, say)
            say("the books: ledger, verification of every batch, bytes through each topic")
            report = examine(config, played, kept=args.keep, began=began)
        except Interrupted as interrupted:
            say(f"{interrupted}: stopping what was started")
            raise
    workspace.write_report(config, report.as_dict())
    print(json.dumps(report.as_dict()) if args.json else f"\n{report.as_text()}", flush=True)
    return 0 if report.passed else 1


def start_kafka(config: RunConfig, keep: bool, stack: ExitStack, say: Say) -> RunConfig:
    """The configuration with a broker that answers, ours unless one was named, and the run's topics on it."""
    if config.kafka.bootstrap_servers == KafkaConfig().bootstrap_servers:
        say("starting a local Kafka")
        broker = open_broker(config.broker)
        stack.callback(broker.stop)
        config = replace(config, kafka=replace(config.kafka, bootstrap_servers=broker.bootstrap_servers))
    elif not keep:
        stack.callback(provision.remove, config)
    say(f"Kafka answers at {config.kafka.bootstrap_servers}; creating the topics of run {config.run}")
    provision.provision(config)
    return plans.settle(config)


def play(config: RunConfig, stack: ExitStack, interrupts: Interrupts, say: Say) -> Played:
    """Train until the stop rule holds: evaluations before and after, workers stopped and what they wrote drained."""
    roles = plans.plan(config, plans.write(config))
    supervisor = stack.enter_context(
        Supervisor(config.run_dir / "logs", interrupts=interrupts, environment=plans.child_environment())
    )
    interrupts.kill_now = supervisor.kill_all
    observer = stack.enter_context(closing(RunObserver(config.kafka, config.run)))
    say("starting the learner (a short format warm start makes version 0), the inference server, the groupers")
    supervisor.start(*roles.consumers)
    supervisor.wait_ready(spec.name for spec in roles.consumers)
    first = evaluate(config, 0, "first")
    say(f"version {first.version} answers {first.exact:.1%} of {first.prompts} held-out prompts exactly; workers start")
    began = time.monotonic()
    supervisor.start(*roles.workers)
    supervisor.wait_ready(spec.name for spec in roles.workers)
    outcome = watch(config, supervisor, observer, say)
    seconds = time.monotonic() - began
    say(f"{outcome}; stopping the workers and draining what they wrote")
    supervisor.stop([spec.name for spec in roles.workers])
    drain(config.kafka, config.run, config.grouper)
    supervisor.stop([spec.name for spec in roles.groupers])
    supervisor.stop([LEARN])
    observer.catch_up()
    last = evaluate(config, observer.policy_version, "last")
    say(f"version {last.version} answers {last.exact:.1%} of {last.prompts} held-out prompts exactly")
    supervisor.stop_all()
    return Played(first, last, observer, outcome, seconds)


def watch(config: RunConfig, supervisor: Supervisor, observer: RunObserver, say: Say) -> str:
    """Say how it goes until the stop rule holds or the learner has made its last step; returns which."""
    due = time.monotonic() + _EVERY_S
    while True:
        supervisor.poll(0.05)
        observer.poll(0.2)
        recent = observer.last(WINDOW)
        # Twice the window, so that it is not one lucky draw of prompts.
        if min(recent.exact, observer.last(2 * WINDOW).exact) > TARGET_EXACT and recent.rollouts == WINDOW:
            return f"exact match over the last {WINDOW:,} rollouts passed {TARGET_EXACT} at step {observer.steps}"
        if supervisor.finished(LEARN):
            return f"the learner made its last step, {config.learner.max_steps}"
        if time.monotonic() >= due:
            due += _EVERY_S
            say(
                f"step {observer.steps:4d}   rollouts {len(observer.scored):7,}   batches {observer.batches:5,}   "
                f"reward {recent.reward:.3f}   exact {recent.exact:.3f}"
            )


def examine(config: RunConfig, played: Played, *, kept: bool, began: float) -> DemoReport:
    """Ask the topics what happened."""
    observer = played.observer
    book = ledger(config.kafka, config.run).as_dict()
    found = verify(config.kafka, config.run, config.grouper.makers).as_dict()
    first, last = observer.first(WINDOW), observer.last(WINDOW)
    return DemoReport(
        run=config.run,
        task=config.task,
        seed=config.seed,
        outcome=played.outcome,
        reward_first=first.reward,
        reward_last=last.reward,
        exact_first=first.exact,
        exact_last=last.exact,
        heldout_first=played.first,
        heldout_last=played.last,
        rollouts=len(observer.scored),
        batches=observer.batches,
        steps=observer.steps,
        seconds=round(time.monotonic() - began, 1),
        training_seconds=round(played.seconds, 1),
        warm_start_steps=config.learner.warm_start.steps,
        topic_bytes=topic_bytes(config),
        ledger=book,
        verify=found,
        kept=kept,
        places=workspace.places(config, kept=kept),
        next=workspace.next_commands(config, kept=kept),
    )


def topic_bytes(config: RunConfig) -> dict[str, int]:
    """Bytes of keys and values written to each topic; of weights, which forget old versions, by their manifests."""
    sizes = {}
    for spec in CATALOGUE:
        if spec.name != "weights":
            messages = clients.read_to_end(
                config.kafka, topic_name(config.run, spec.name), isolation="read_uncommitted"
            )
            sizes[spec.name] = sum(len(message.key() or b"") + len(message.value() or b"") for message in messages)
    manifests = read_manifests(config.kafka, config.run).values()
    return {**sizes, "weights": sum(chunk.size_bytes for manifest in manifests for chunk in manifest.chunks)}
