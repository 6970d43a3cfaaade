"""`rollstream demo`: the whole loop on a local Kafka, until the model has learned its task; then the books are checked.

On the way a grouping consumer and the learner are killed, to show that the books close all the same. Every part is a
process of its own, started and stopped here. Whatever ends the demo, Ctrl-C included, nothing it started is left.
"""

import argparse
import json
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial

from consumers.grouping.marks import drain
from consumers.weights.publisher import read_manifests
from infra.broker import ExternalBroker, LocalBroker, open_broker
from pipeline import plan as plans
from pipeline import provision, workspace
from pipeline.config import RunConfig
from pipeline.display import Display
from pipeline.evaluation import evaluate
from pipeline.faults import Fault, SecondAct, plan_faults
from pipeline.ledger import ledger
from pipeline.lengths import check_lengths
from pipeline.observer import RunObserver
from pipeline.one_process import compare
from pipeline.plan import LEARN
from pipeline.process import Interrupted, Interrupts, in_a_hurry
from pipeline.report import DemoReport, Evaluation
from pipeline.roles.jax_runtime import require_jax
from pipeline.supervisor import Supervisor
from pipeline.tools.lineage import Node, of_place
from pipeline.tools.replay import replay
from pipeline.tools.view import Place, View
from pipeline.verify import verify
from producers.tasks import create_task
from topics import clients
from topics.catalogue import CATALOGUE, topic_name
from topics.config import KafkaConfig

TARGET_EXACT = 0.9
WINDOW = 1000
"""Rollouts whose mean decides, and is reported at start and end."""
OTHER_ESTIMATOR = "grpo"
"""What the recorded log is folded with once more, beside the original; where that is it already, `_ANOTHER`."""
_ANOTHER = "rloo"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Played:
    """What training left behind."""

    first: Evaluation
    last: Evaluation
    observer: RunObserver
    outcome: str
    seconds: float
    faults: tuple[Fault, ...]


def run(config: RunConfig, args: argparse.Namespace) -> int:
    """Play the demo; 0 when it learned, the ledger balances and every batch follows from the log, else 1."""
    began = time.monotonic()
    require_jax()
    check_lengths(config, create_task(config.task, config.tasks))
    interrupts = Interrupts()
    interrupts.install()
    base = config.data_dir
    workspace.forget_earlier(base)
    config = workspace.prepare(config)
    workspace.log_to(config.run_dir / "logs" / "demo.log", config.log_level)
    display = Display(json=args.json, began=began, newest=WINDOW)
    say = display.say
    with ExitStack() as stack:
        stack.callback(workspace.leave, config, keep=args.keep)
        try:
            config = start_kafka(config, args.keep, stack, say)
            played = play(config, stack, interrupts, display, faults=not args.no_faults)
            say("the books: ledger, verification of every batch, bytes through each topic")
            report = examine(config, played, kept=args.keep, began=began, say=say)
            if args.compare:
                say(f"{report.steps:,} steps of the same recipe in one process")
                beside = compare(config, report.steps, played.seconds, played.observer.rewards)
                report = replace(report, compare=beside, seconds=round(time.monotonic() - began, 1))
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
        stack.push(partial(_end_broker, broker, keep))
        config = replace(config, kafka=replace(config.kafka, bootstrap_servers=broker.bootstrap_servers))
    elif not keep:
        stack.callback(provision.remove, config)
    say(f"Kafka answers at {config.kafka.bootstrap_servers}; creating the topics of run {config.run}")
    provision.provision(config)
    return plans.settle(config)


def _end_broker(
    broker: LocalBroker | ExternalBroker, keep: bool, _kind: object, error: BaseException | None, _trace: object
) -> None:
    """Stop it; after Ctrl-C, which waits for nothing, kill it, or leave it to its keeper where its data is kept."""
    if not in_a_hurry(error) or isinstance(broker, ExternalBroker):
        broker.stop()
    elif not keep:
        broker.kill()


def play(
    config: RunConfig, stack: ExitStack, interrupts: Interrupts, display: Display, *, faults: bool = True
) -> Played:
    """Train until the stop rule holds: evaluations before and after, workers stopped and what they wrote drained.

    With `faults` there is a second act.
    """
    say = display.say
    roles = plans.plan(config, plans.write(config))
    supervisor = stack.enter_context(
        Supervisor(
            config.run_dir / "logs",
            interrupts=interrupts,
            environment=plans.child_environment(config),
            on_progress=lambda role, progress: say(f"{role}: {progress}"),
        )
    )

    def kill_now() -> None:
        display.restore()
        supervisor.kill_now()

    interrupts.kill_now = kill_now
    observer = stack.enter_context(closing(RunObserver(config.kafka, config.run)))
    say("starting the learner (a short format warm start makes version 0), the inference server, the groupers")
    supervisor.start(*roles.consumers)
    supervisor.wait_ready(spec.name for spec in roles.consumers)
    first = evaluate(config, 0, "first")
    say(f"version {first.version} answers {first.exact:.1%} of {first.prompts} held-out prompts exactly; workers start")
    began = time.monotonic()
    supervisor.start(*roles.workers)
    supervisor.wait_ready(spec.name for spec in roles.workers)
    act = SecondAct(plan_faults(config, roles) if faults else None, supervisor, say)
    outcome = watch(config, supervisor, observer, act, display)
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
    return Played(first, last, observer, outcome, seconds, act.faults)


def watch(config: RunConfig, supervisor: Supervisor, observer: RunObserver, act: SecondAct, display: Display) -> str:
    """Show how it goes until the stop rule holds or the learner has made its last step; returns which."""
    with display.live():
        while True:
            supervisor.poll(0.05)
            observer.poll(0.2)
            act.look(observer.steps)
            recent = observer.last(WINDOW)
            # What was killed has to be back before anything is drained. Twice the window, so that it is not one lucky
            # draw of prompts.
            if not act.pending:
                if min(recent.exact, observer.last(2 * WINDOW).exact) > TARGET_EXACT and recent.rollouts == WINDOW:
                    return (
                        f"exact match over the last {WINDOW:,} rollouts passed {TARGET_EXACT} at step {observer.steps}"
                    )
                if supervisor.finished(LEARN):
                    return f"the learner made its last step, {config.learner.max_steps}"
            display.show(observer)


def examine(config: RunConfig, played: Played, *, kept: bool, began: float, say: Say) -> DemoReport:
    """Ask the topics what happened."""
    observer = played.observer
    book = ledger(config.kafka, config.run).as_dict()
    found = verify(config.kafka, config.run, config.grouper.makers).as_dict()
    traced = trace(config)
    estimator = OTHER_ESTIMATOR if config.grouping.estimator != OTHER_ESTIMATOR else _ANOTHER
    say(f"the same log as the estimator {estimator} would have had it")
    other = replay(config.kafka, config.run, {"estimator": estimator}, config.grouper.makers)
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
        faults=played.faults,
        lineage=traced,
        replay=other,
        kept=kept,
        places=workspace.places(config, kept=kept),
        next=workspace.next_commands(config, kept=kept),
    )


def trace(config: RunConfig) -> Node | None:
    """Where a rollout of the newest batch trained on came from, and what became of it."""
    with View(config.kafka, config.run) as view:
        for step in reversed(view.steps):
            for use in step.uses:
                if use.use == "trained":
                    batch = view.batch(use.batch_id)
                    row = next(iter(use.row_numbers), 0)
                    return of_place(view, Place(batch.partition, int(batch.source_offsets[row])))
    return None


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
