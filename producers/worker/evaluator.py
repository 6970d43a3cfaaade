"""Evaluates the held-out split during a run, at regular intervals of policy versions, and writes rollouts to `evals`.

Each due version is evaluated once, even across restarts, and so is a version that an operator requests. A version
overtaken by a later due version is skipped, and a log event names it. Servers may swap versions during an evaluation,
so each rollout names the versions that answered.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing

from rollstream.producers.config import EvaluationConfig, WorkerConfig
from rollstream.producers.flow.policy_versions import PolicyFollower
from rollstream.producers.flow.start_progress import reported
from rollstream.producers.inference.client import client_of
from rollstream.producers.inference.errors import InferenceRefused, InferenceUnavailable
from rollstream.producers.metrics_publisher import MetricsPublisher
from rollstream.producers.rollout_producer import RolloutProducer
from rollstream.producers.tasks.environment_loading import LoadedEnvironment
from rollstream.producers.worker.evaluation import Evaluation, evaluate, evaluation_gateway
from rollstream.producers.worker.evaluation_figures import prompts_named
from rollstream.producers.worker.group_player import EpisodeFailed, finish_or_stop
from rollstream.topics.config import KafkaConfig
from rollstream.topics.control.steering import SteeringFollower
from rollstream.topics.errors import RecordError
from rollstream.topics.heartbeats import START, beat, beating
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.logs import event
from rollstream.topics.metrics.writer import MetricsWriter
from rollstream.topics.records import EvaluationRequest, Rollout
from rollstream.topics.wire.catalogue import topic_name

logger = logging.getLogger(__name__)

PHASE = "periodic"
COMPONENT = "eval"
PROGRESS_COMPONENT = "evaluator"
"""Component of the periodic progress records; each record of `COMPONENT` holds one evaluation."""
_LOOK_EVERY_S = 0.2
_PASSING = (InferenceRefused, InferenceUnavailable, EpisodeFailed, RecordError, TimeoutError)
"""Errors that end one evaluation; any other error ends the evaluator."""


def due_version(published: Iterable[int], every: int, settled: Iterable[int]) -> tuple[int | None, list[int]]:
    """Return the version to evaluate now (None if there is none), and the overtaken versions to skip.

    `published` are the versions on record; `settled` are the versions already evaluated or skipped.
    """
    known = set(settled)
    newest = max((v for v in known if v % every == 0), default=-1)
    waiting = sorted(v for v in published if v % every == 0 and v not in known)
    if waiting and waiting[-1] > newest:
        return waiting[-1], waiting[:-1]
    return None, waiting


def share_of(environments: Sequence[LoadedEnvironment], ordinal: int, evaluators: int) -> Sequence[LoadedEnvironment]:
    """Return an evaluator's environments; none once scaling down has put its ordinal out of range."""
    return environments[ordinal::evaluators] if ordinal < evaluators else environments[:0]


def evaluated_versions(rollouts: Iterable[Rollout], environments: Iterable[str]) -> dict[str, set[int]]:
    """Return, by environment, the versions whose answers are complete; evaluations cut short by a crash are left out.

    Reads the rollouts once and keeps none of them, because a run may have more than fit into memory.
    """
    answers: dict[str, dict[int, set[str]]] = {name: defaultdict(set) for name in environments}
    needed: dict[tuple[str, int], int] = {}
    for rollout in rollouts:
        # Other programs may write anything to `evals`.
        prompts = prompts_named(rollout)
        if prompts is not None and rollout.environment in answers and rollout.extra.get("phase") == PHASE:
            answers[rollout.environment][rollout.policy_version].add(rollout.episode_uid or rollout.uid)
            needed[rollout.environment, rollout.policy_version] = prompts * rollout.group_size
    return {
        name: {version for version, episodes in versions.items() if len(episodes) >= needed[name, version]}
        for name, versions in answers.items()
    }


class SettledVersions:
    """The versions of one environment that are not evaluated any more, unless somebody requests it."""

    def __init__(self, evaluated: Iterable[int]) -> None:
        self.versions = set(evaluated)
        """Versions that were evaluated, failed, or were passed by."""
        self._given_up: dict[int, EvaluationRequest | None] = {}
        """The newest request at the time when a version failed or was passed by."""

    def give_up(self, version: int, request: EvaluationRequest | None) -> None:
        """Settle a version without an evaluation; `request` is the newest request when its evaluation began."""
        self.versions.add(version)
        self._given_up[version] = request

    def reopen(self, request: EvaluationRequest) -> None:
        """Let the requested version be evaluated if it was given up before the request was made."""
        if self._given_up.get(request.version, request) != request:
            self.versions.remove(request.version)
            del self._given_up[request.version]


def evaluation_metrics(evaluation: Evaluation) -> dict[str, float]:
    """Return the metrics of an evaluation for the topic `metrics`."""
    return {
        "eval/version": float(evaluation.version),
        "eval/lowest_version": float(evaluation.lowest_version),
        "eval/highest_version": float(evaluation.highest_version),
        "eval/prompts": float(evaluation.prompts),
        **{f"eval/{name}": value for name, value in evaluation.components.items()},
        **{f"eval/{name}": value for name, value in evaluation.figures.items()},
    }


async def run_evaluator(
    environments: Sequence[LoadedEnvironment],
    kafka: KafkaConfig,
    run: str,
    config: EvaluationConfig,
    worker: WorkerConfig,
    *,
    max_calls: int,
    ordinal: int = 0,
    stop: asyncio.Event,
    on_ready: Callable[[], None] = lambda: None,
    on_progress: Callable[[str], object] = lambda _progress: None,
) -> None:
    """Evaluate due versions on each environment until `stop` is set, then finish within worker.drain_timeout_s.

    `on_progress` receives the progress of reading earlier evaluations, which may take long. `worker` holds the settings
    of the servers; `max_calls` limits the calls of an agent's episode. Evaluators divide the environments by their
    ordinals, even when their number changes during the run.
    Raises TopicError, BrokerUnavailable, DeliveryError.
    """
    skipped = SkippedRecords(COMPONENT)
    with ExitStack() as stack:
        policies = stack.enter_context(PolicyFollower(kafka, run))
        steering = stack.enter_context(SteeringFollower(kafka, run))
        producer = stack.enter_context(RolloutProducer(kafka, run, topic="evals"))
        metrics = stack.enter_context(closing(MetricsWriter(kafka, run, COMPONENT, "eval")))
        mine: Sequence[LoadedEnvironment] = ()
        settled: dict[str, SettledVersions] = {}

        def read_evaluated(names: Sequence[str]) -> dict[str, set[int]]:
            topic = topic_name(run, "evals")
            messages = reported(read_to_end(kafka, topic), topic, on_progress)
            return evaluated_versions((rollout for _message, rollout in skipped.records(Rollout, messages)), names)

        async def take(wanted: Sequence[LoadedEnvironment], loop: str) -> None:
            """Evaluate these environments from now on, except at versions that any evaluator has already evaluated."""
            nonlocal mine, settled
            evaluated = await beating(loop, asyncio.to_thread(read_evaluated, [each.name for each in wanted]))
            mine = wanted
            settled = {name: SettledVersions(versions) for name, versions in evaluated.items()}
            versions = {name: sorted(each.versions) for name, each in settled.items()}
            event(logger, "evaluator_takes", every_versions=config.every_versions, evaluated=versions)

        await take(share_of(environments, ordinal, steering.state.numbers.get("eval", config.processes)), START)
        progress = {"evaluations_total": 0.0, "prompts_total": 0.0, "failed_total": 0.0, "policy_version": -1.0}
        component = f"{PROGRESS_COMPONENT}-{ordinal}" if ordinal else PROGRESS_COMPONENT
        publisher = MetricsPublisher(
            kafka, run, component, "eval", lambda: progress, interval_s=config.metrics_interval_s
        )
        async with (
            client_of(worker, policies) as client,
            evaluation_gateway(
                environments, kafka, run, worker, policies, max_calls=max_calls, temperature=config.temperature
            ) as gateway,
            publisher,
        ):
            on_ready()
            while True:
                beat("evaluating")
                stopping = stop.is_set()
                share = share_of(environments, ordinal, steering.state.numbers.get("eval", config.processes))
                if share != mine:
                    await take(share, "evaluating")
                complete = set.intersection(*(each.versions for each in settled.values())) if settled else set()
                published = await asyncio.to_thread(policies.read, _LOOK_EVERY_S)
                due = published.steps if mine else ()
                version, passed = due_version(due, config.every_versions, complete)
                request = steering.state.evaluation_request
                if passed:
                    event(logger, "evaluations_passed_by", versions=passed)
                for each in settled.values():
                    for earlier in passed:
                        each.give_up(earlier, request)
                if version is None and request is not None and request.version in published.steps:
                    version = request.version
                    for each in settled.values():
                        each.reopen(request)
                for environment in mine:
                    if version is None or version in settled[environment.name].versions:
                        continue
                    settled[environment.name].versions.add(version)
                    progress["policy_version"] = float(version)
                    evaluating = evaluate(
                        environment,
                        client,
                        producer,
                        version=version,
                        phase=PHASE,
                        gateway=gateway,
                        samples=environment.entry.samples or config.samples,
                        max_prompts=environment.entry.max_prompts or config.max_prompts,
                        concurrency=config.concurrency,
                        temperature=config.temperature,
                        seed=config.seed,
                        exactly=False,
                        episode_timeout_s=worker.episode_timeout_s,
                    )
                    try:
                        finishing = finish_or_stop(evaluating, stop, grace_s=worker.drain_timeout_s)
                        evaluation = await beating("evaluating", finishing)
                    except _PASSING as error:
                        settled[environment.name].give_up(version, request)
                        reason = str(error) or f"not finished {worker.drain_timeout_s:g} s after the request to stop"
                        progress["failed_total"] += 1
                        event(
                            logger,
                            "evaluation_failed",
                            level=logging.WARNING,
                            environment=environment.name,
                            version=version,
                            error=reason,
                        )
                        continue
                    progress["evaluations_total"] += 1
                    progress["prompts_total"] += evaluation.prompts
                    records_skipped = skipped.total + policies.skipped.total
                    values = {**evaluation_metrics(evaluation), "records_skipped_total": float(records_skipped)}
                    labels = {"environment": environment.name, "split": "heldout"}
                    metrics.write(values, labels, step=published.steps[version])
                    event(logger, "evaluated", figures={name: round(value, 4) for name, value in values.items()})
                # Return even if more versions are due: a learner that keeps publishing makes versions due without end.
                if stopping:
                    return
