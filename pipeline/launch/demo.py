"""`rollstream demo`: runs the whole loop on a local Kafka until the model has learned its task, then checks the ledger.

On the way it kills a grouping consumer and the learner, to show that the ledger still balances. Every role is a
separate process. However the demo ends, Ctrl-C included, no process that it started remains.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rollstream.consumers.grouping.process.mark_writer import drain
from rollstream.consumers.weights.manifests import committed_manifests
from rollstream.infra.broker.broker import ExternalBroker, LocalBroker, open_broker
from rollstream.infra.broker.providers import external_kafka
from rollstream.pipeline.audit.ledger import ledger
from rollstream.pipeline.audit.verification import verify
from rollstream.pipeline.command_line.command_parser import Setting, set_handler
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.deployment.description import ENGINE, ENV, GROUP, LEARN
from rollstream.pipeline.index.indexed_run import RolloutPlace, indexed_run
from rollstream.pipeline.index.lineage import LineageNode, record_lineage
from rollstream.pipeline.launch.demo_engine import add_flags, engine_use, with_engine
from rollstream.pipeline.launch.demo_faults import Fault, FaultInjector, plan_faults
from rollstream.pipeline.launch.demo_report import DemoReport, HeldOutScore
from rollstream.pipeline.launch.held_out_evaluation import evaluate
from rollstream.pipeline.process.role_process import Interrupted, Interrupts, in_a_hurry
from rollstream.pipeline.run import plan as plans
from rollstream.pipeline.run import workspace
from rollstream.pipeline.run.display import Display
from rollstream.pipeline.run.jax_runtime import require_jax
from rollstream.pipeline.run.learner_start import check_lengths, demonstrated
from rollstream.pipeline.run.observer import RunObserver
from rollstream.pipeline.run.plan import ServicePorts
from rollstream.pipeline.run.run_environments import environments_of
from rollstream.pipeline.run.start_stages import StartStages
from rollstream.pipeline.run.supervisor import Supervisor
from rollstream.pipeline.tools import topics
from rollstream.pipeline.tools.replay import replay
from rollstream.pipeline.tools.report import write_report
from rollstream.pipeline.tools.top import frame
from rollstream.pipeline.ui.run_page import RunPage
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.kafka import provisioning
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.wire.catalogue import CATALOGUE, topic_name

OTHER_ESTIMATOR = "grpo"
"""Estimator with which the log is replayed for comparison; a run that uses it is replayed with `_ANOTHER` instead."""
_ANOTHER = "rloo"

_SETTINGS = Path(__file__).parents[1]
_RECIPES = _SETTINGS / "recipes"
"""Folder of recipes by task, for tasks that the settings of the default task do not suit."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class TrainingOutcome:
    """Result of the training part of the demo."""

    first: HeldOutScore
    last: HeldOutScore
    observer: RunObserver
    outcome: str
    seconds: float
    faults: tuple[Fault, ...]


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream demo`."""
    set_handler(parser, run, example="rollstream demo --seed 1 --task choices", json=True)
    parser.add_argument(
        "--seed", dest="seed=", action=Setting, metavar="N", help="seed of every random draw (default: 0)"
    )
    parser.add_argument(
        "--task",
        dest="task=",
        action=Setting,
        metavar="NAME",
        help="an environment: dsort3 (the default), dsort4, add, guess, chain_sum, choices, coding, tools, or one of "
        "yours (game.py:Game)",
    )
    parser.add_argument(
        "--steps", dest="learner.max_steps=", action=Setting, metavar="N", help="stop after this many learner steps"
    )
    parser.add_argument(
        "--data",
        dest="data_dir=",
        action=Setting,
        metavar="DIR",
        help="folder for its data (default: .rollstream/demo)",
    )
    add_flags(parser)
    parser.add_argument("--keep", action="store_true", help="keep the broker's data for later queries")
    parser.add_argument("--no-faults", action="store_true", help="do not kill processes during the run")
    parser.add_argument(
        "--scale",
        action="store_true",
        help="train nothing: show how grouping processes are added and removed as a load rises and falls, as a picture",
    )
    parser.set_defaults(default_config=recipe_of)


def recipe_of(args: argparse.Namespace) -> Path:
    """Return the demo's settings file: with --scale the file for scaling, else the task's recipe or the default."""
    if args.scale:
        return _SETTINGS / "scale.toml"
    own = _RECIPES / (getattr(args, "task=", None) or "") / "run.toml"
    return own if own.is_file() else _RECIPES / "dsort3" / "run.toml"


def run(config: RunConfig, args: argparse.Namespace) -> int:
    """Run the demo; 0 if the model learned, the ledger balances and every batch follows from the log, else 1."""
    if args.scale:
        from rollstream.pipeline.launch import scale_demo

        return scale_demo.run(config, args, start_kafka)
    began = time.monotonic()
    require_jax()
    if config.awaits_labels:
        raise ConfigurationError(
            "the rewards of an environment come from a labeler, but a demo plays only environments that compute their "
            "own rewards; use `rollstream run`"
        )
    check_lengths(config, environments_of(config))
    config = with_engine(config, args)
    interrupts = Interrupts()
    interrupts.install()
    with workspace.prepared(config) as placed:
        return _demo(placed, args, interrupts, began)


def _demo(config: RunConfig, args: argparse.Namespace, interrupts: Interrupts, began: float) -> int:
    """Run the demo in its folder. `began` is its start on the monotonic clock, in seconds."""
    workspace.log_to(config.run_dir / "logs" / "demo.log", config.log_level)
    display = display_of(config, json=args.json, began=began)
    say = display.say
    with ExitStack() as stack:
        stack.callback(workspace.leave, config, keep=args.keep)
        try:
            config = start_kafka(config, args.keep, stack, say)
            training = train(config, stack, interrupts, display, faults=not args.no_faults)
            say("checking: ledger, verification of every batch, bytes through each topic")
            report = examine(config, training, kept=args.keep, began=began, say=say)
        except Interrupted as interrupted:
            say(f"{interrupted}: stopping what was started")
            raise
    workspace.write_report(config, report.as_dict())
    print(json.dumps(report.as_dict()) if args.json else f"\n{report.as_text()}", flush=True)
    return 0 if report.passed else 1


def display_of(config: RunConfig, *, json: bool, began: float) -> Display[RunObserver]:
    """Return the display of the demo, which shows mean rewards over the window of the stop rule."""
    newest = config.demo.window

    def line(observer: RunObserver) -> str:
        recent = observer.last(newest)
        return (
            f"step {observer.steps:4d}   rollouts {len(observer.scored):7,}   batches {observer.batches:5,}   "
            f"reward {recent.reward:.3f}   success {recent.success:.3f}"
        )

    return Display(
        json=json,
        began=began,
        line=line,
        frame=lambda observer, width: frame(observer.snapshot(newest), width),
    )


def start_kafka(config: RunConfig, keep: bool, stack: ExitStack, say: Say) -> RunConfig:
    """Start a local broker unless another one is configured, create the run's topics, return the new configuration."""
    broker: LocalBroker | ExternalBroker | None = None
    if config.kafka.bootstrap_servers == KafkaConfig().bootstrap_servers:
        if external_kafka() is None:
            say("starting a local Kafka")
        broker = open_broker(config.broker)
        config = replace(config, kafka=replace(config.kafka, bootstrap_servers=broker.bootstrap_servers))
    if isinstance(broker, LocalBroker):
        stack.push(partial(_end_broker, broker, keep))
    else:
        # KAFKA_BOOTSTRAP_SERVERS may name a broker of others at the default address.
        _check_is_new(config)
        if not keep:
            stack.callback(topics.remove, config)
    say(f"Kafka answers at {config.kafka.bootstrap_servers}; creating the topics of run {config.run}")
    topics.provision(config)
    return plans.settle(config)


def _check_is_new(config: RunConfig) -> None:
    """Raise ConfigurationError if the run has topics: a demo would add to them, and delete them at its end."""
    if existing := provisioning.describe(config.kafka, config.run):
        raise ConfigurationError(
            f"run {config.run} at {config.kafka.bootstrap_servers} has {len(existing)} topics already, and a demo "
            "deletes its topics; give the demo a new name with --run, or unset ROLLSTREAM_RUN"
        )


def _end_broker(
    broker: LocalBroker | ExternalBroker, keep: bool, _kind: object, error: BaseException | None, _trace: object
) -> None:
    """Stop the broker. After Ctrl-C kill it, or leave it to its keeper process if its data is kept."""
    if not in_a_hurry(error) or isinstance(broker, ExternalBroker):
        broker.stop()
    elif not keep:
        broker.kill()


def train(
    config: RunConfig, stack: ExitStack, interrupts: Interrupts, display: Display[RunObserver], *, faults: bool = True
) -> TrainingOutcome:
    """Train until the stop rule holds, evaluate before and after, stop the workers and drain what they wrote.

    With `faults`, kill processes during training.
    """
    say = display.say
    path = plans.write(config)
    roles = plans.plan(config, path)
    stages = StartStages(config.data_dir / "cache", json=display.json, say=say)
    supervisor = stack.enter_context(
        Supervisor(
            config.run_dir / "logs",
            interrupts=interrupts,
            environment=plans.child_environment(config),
            on_progress=stages.note,
            place=ServicePorts(config).place,
        )
    )

    def kill_now() -> None:
        stages.restore()
        display.restore()
        supervisor.kill_now()

    interrupts.kill_now = kill_now
    page = RunPage(config, path, supervisor)
    observer = stack.enter_context(closing(RunObserver(config.kafka, config.run)))
    server = "a vLLM server, which takes minutes" if roles.of(ENGINE) else "the inference server"
    say(f"starting the learner (a short format warm start makes version 0), {server}, the groupers")
    stages.start(supervisor, *roles.consumers)
    page.tell(say)
    first = evaluate(config, 0, "first")
    say(f"version {first.version} answers {first.success:.1%} of {first.prompts} held-out prompts right; workers start")
    began = time.monotonic()
    stages.start(supervisor, *roles.of(ENV))
    injector = FaultInjector(plan_faults(config, roles) if faults else None, supervisor, say)
    outcome = watch(config, supervisor, observer, injector, display, page)
    seconds = time.monotonic() - began
    say(f"{outcome}; stopping the workers and draining what they wrote")
    supervisor.stop([spec.name for spec in roles.of(ENV)])
    drain(config.kafka, config.run, config.grouper)
    supervisor.stop([spec.name for spec in roles.of(GROUP)])
    supervisor.stop([LEARN])
    observer.catch_up()
    last = evaluate(config, observer.policy_version, "last")
    say(f"version {last.version} answers {last.success:.1%} of {last.prompts} held-out prompts right")
    supervisor.stop_all()
    return TrainingOutcome(first, last, observer, outcome, seconds, injector.faults)


def watch(
    config: RunConfig,
    supervisor: Supervisor,
    observer: RunObserver,
    injector: FaultInjector,
    display: Display[RunObserver],
    page: RunPage,
) -> str:
    """Show progress until the stop rule holds or the learner has made its last step; return the reason for stopping, as
    text."""
    window, target = config.demo.window, config.demo.target
    with display.live():
        while True:
            supervisor.poll(0.05)
            page.tell(display.say)
            observer.poll(0.2)
            injector.poll(observer.steps)
            recent = observer.last(window)
            # Killed processes must be back before anything is drained. The mean over twice the window rules out one
            # lucky draw of prompts.
            if not injector.pending:
                if min(recent.success, observer.last(2 * window).success) > target and recent.rollouts == window:
                    return f"success over the last {window:,} rollouts passed {target} at step {observer.steps}"
                if supervisor.finished(LEARN):
                    return f"the learner made its last step, {config.learner.max_steps}"
            display.show(observer)


def examine(config: RunConfig, training: TrainingOutcome, *, kept: bool, began: float, say: Say) -> DemoReport:
    """Build the report from the topics."""
    observer = training.observer
    book = ledger(config.kafka, config.run).as_dict()
    makers, estimators = config.grouper.makers, config.grouper.estimators
    # The run has ended: the checks may have every core.
    cores = os.cpu_count() or 1
    verification = verify(config.kafka, config.run, makers, estimators=estimators, processes=cores).as_dict()
    traced = trace(config)
    estimator = OTHER_ESTIMATOR if config.grouping.estimator != OTHER_ESTIMATOR else _ANOTHER
    say(f"replaying the same log with the estimator {estimator}")
    changes = {"estimator": estimator}
    other = replay(config.kafka, config.run, changes, makers, estimators=estimators, processes=cores)
    first, last = observer.first(config.demo.window), observer.last(config.demo.window)
    return DemoReport(
        run=config.run,
        task=", ".join(entry.name or entry.use for entry in config.mixture),
        seed=config.seed,
        window=config.demo.window,
        needed_gain=config.demo.gain,
        engine=engine_use(config),
        outcome=training.outcome,
        reward_first=first.reward,
        reward_last=last.reward,
        success_first=first.success,
        success_last=last.success,
        heldout_first=training.first,
        heldout_last=training.last,
        rollouts=len(observer.scored),
        batches=observer.batches,
        steps=observer.steps,
        seconds=round(time.monotonic() - began, 1),
        training_seconds=round(training.seconds, 1),
        warm_start_steps=config.learner.warm_start.steps,
        demonstrated=demonstrated(environments_of(config)),
        topic_bytes=topic_bytes(config),
        ledger=book,
        verify=verification,
        faults=training.faults,
        lineage=traced,
        replay=other,
        kept=kept,
        places={"page": str(write_report(config)), **workspace.places(config, kept=kept)},
        next=workspace.next_commands(config, kept=kept),
    )


def trace(config: RunConfig) -> LineageNode | None:
    """Return the lineage of a rollout of the newest batch that was trained on."""
    with indexed_run(config) as view:
        for step in reversed(view.steps()):
            for use in step.uses:
                if use.use == "trained":
                    batch = view.batch(use.batch_id)
                    row = next(iter(use.row_numbers), 0)
                    return record_lineage(view, RolloutPlace(batch.partition, int(batch.source_offsets[row])))
    return None


def topic_bytes(config: RunConfig) -> dict[str, int]:
    """Return the bytes of keys and values written to each topic; for the compacted `weights`, by its manifests."""
    sizes = {}
    for spec in CATALOGUE:
        if spec.name != "weights":
            messages = read_to_end(config.kafka, topic_name(config.run, spec.name), isolation="read_uncommitted")
            sizes[spec.name] = sum(len(message.key or b"") + len(message.value or b"") for message in messages)
    manifests = committed_manifests(config.kafka, config.run)
    return {**sizes, "weights": sum(chunk.size_bytes for manifest in manifests for chunk in manifest.chunks)}
