"""Carries learners and weights over to the successor of a run: checkpoints, positions, and the newest version."""

import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rollstream.consumers.batch_reader import first_offset
from rollstream.consumers.learner.records.checkpoint_paths import checkpoint_steps, learner_directory
from rollstream.consumers.learner.records.fork import copy_checkpoint, places_in
from rollstream.consumers.learner.records.past_steps import index_between
from rollstream.consumers.step_log import StepLog, read_learners, read_steps
from rollstream.consumers.weights.chains import ChainBroken, needed
from rollstream.consumers.weights.content import ChunksGone, ChunksLate, WeightsRefused
from rollstream.consumers.weights.fetcher import ChunkFetcher
from rollstream.consumers.weights.loading import load_version
from rollstream.consumers.weights.manifests import none_whole, params_digest_of, read_manifests
from rollstream.consumers.weights.publisher import WeightsPublisher
from rollstream.pipeline.config import RunConfig
from rollstream.topics.catalogue import topic_name
from rollstream.topics.codec import encode
from rollstream.topics.errors import DeadlineExceeded, StateRefused, TopicError
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.transactional_ids import fence, transactional_id
from rollstream.topics.keys import encode_key
from rollstream.topics.records import LearnerStep, PolicyManifest, RunSplit
from rollstream.topics.retired_learners import retired_learners

_POLL_S = 0.2


class CarriedLearner(NamedTuple):
    """The state of a learner of the run that ends, from which the learner continues in the successor."""

    name: str
    step: int
    """Its last step."""
    places: Mapping[str, int]
    """The places in the index of the run that ends that its checkpoint names, all at its position."""
    checkpoints: Path | None
    """Directory of its checkpoints; None if it keeps its position itself."""


def check_buffers(config: RunConfig) -> None:
    """Raise StateRefused if a rollout buffer holds rollouts that no step has trained on or skipped: the successor's
    learner begins with an empty buffer, because the steps that say what it holds stay in the run that ends."""
    for name in _learners(config):
        last = _last_step(config, name, with_checkpoints=True)
        held = 0 if last.oldest < 0 or last.input_run != config.run else _never_used(config, last)
        if held:
            raise StateRefused(
                f"the rollout buffer of learner {name} of run {config.run} holds {held} rollouts that no step has "
                f"trained on or skipped, and a split would lose them: let the learner use them up with `rollstream "
                f"stop --drain --run {config.run}`, or retire it with `rollstream steer learner retire {name} --run "
                f"{config.run}`, and split again"
            )


def _never_used(config: RunConfig, last: LearnerStep) -> int:
    """Rollouts between the oldest that a buffer holds after a step and the position that no step names."""
    used: defaultdict[int, set[int]] = defaultdict(set)
    for record in read_steps(config.kafka, config.run, last.learner).values():
        for use in (use for use in record.uses if use.index_offset >= last.oldest):
            used[use.index_offset].update(use.row_numbers or range(use.rows))
    entries = index_between(config.kafka, config.run, last.oldest, last.position)
    return sum(entry.rollouts - len(used[at]) for at, entry in entries.items())


def stopped_learners(config: RunConfig, wait_s: float, *, with_checkpoints: bool) -> list[CarriedLearner]:
    """Wait until the learners that train on a run's batches have stopped with a checkpoint of their last step.

    Afterwards none of them can write to the run. Raises DeadlineExceeded if a checkpoint is missing after `wait_s`, and
    StateRefused for a learner that trains on another run's batches or has made another step in the meantime.
    """
    deadline = time.monotonic() + wait_s
    learners = [_stopped(config, name, deadline, with_checkpoints=with_checkpoints) for name in _learners(config)]
    fence(config.kafka, transactional_id(config.run, "learner"))
    for learner in learners:
        newest = _last_step(config, learner.name, with_checkpoints=with_checkpoints)
        if newest.step != learner.step:
            raise StateRefused(f"learner {learner.name} made step {newest.step} in the meantime; split again")
    return learners


def _learners(config: RunConfig) -> list[str]:
    """Learners on record that are not retired."""
    return sorted(read_learners(config.kafka, config.run).keys() - retired_learners(config.kafka, config.run).keys())


def _last_step(config: RunConfig, name: str, *, with_checkpoints: bool) -> LearnerStep:
    """Return the last step of a learner; with checkpoints, the last one that was made: of a step that waits only skips
    are on record, and there is no checkpoint of it."""
    steps = read_steps(config.kafka, config.run, name)
    made = [step for step, record in steps.items() if record.made] if with_checkpoints else []
    return steps[max(made or steps)]


def _stopped(config: RunConfig, name: str, deadline: float, *, with_checkpoints: bool) -> CarriedLearner:
    directory = learner_directory(config.learner.checkpoint.directory, config.run, name)
    while True:
        last = _last_step(config, name, with_checkpoints=with_checkpoints)
        if last.input_run != config.run:
            raise StateRefused(
                f"learner {name} of run {config.run} trains on batches of run {last.input_run}; retire it with "
                f"`rollstream steer learner retire {name} --run {config.run}`, and split again"
            )
        if not with_checkpoints:
            return CarriedLearner(name, last.step, {"position": last.position}, None)
        steps = checkpoint_steps(directory)
        if steps and steps[-1] == last.step:
            places = places_in(directory, last.step)
            # All rollouts before the position are on record; those that a buffer still holds are not drawn again.
            return CarriedLearner(name, last.step, dict.fromkeys(places, places["position"]), directory)
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"learner {name} made step {last.step}, but {directory} has checkpoints of steps {steps}; start it, "
                f"let it stop with a checkpoint of its last step, and split again. If the learner keeps its position "
                f"itself, add --without-checkpoints; if its checkpoints are elsewhere, set learner.checkpoint.directory"
            )
        time.sleep(_POLL_S)


def first_needed(config: RunConfig, learners: list[CarriedLearner]) -> int:
    """The first index offset whose batch a learner may still read."""
    places = [place for learner in learners for place in learner.places.values()]
    return min(places, default=first_offset(config.kafka, config.run))


def carry_checkpoints(
    config: RunConfig, after: RunConfig, split: RunSplit, learners: list[CarriedLearner]
) -> dict[str, int]:
    """Copy the checkpoints, each with its position in the successor's index, and return the positions by learner.

    Safe to repeat.
    """
    offsets = [
        message.offset
        for message in read_to_end(config.kafka, topic_name(config.run, "batch-index"), start=split.carried_from)
    ]
    positions = {}
    for learner in learners:
        places = {
            name: split.carried_at + sum(offset < place for offset in offsets) for name, place in learner.places.items()
        }
        positions[learner.name] = places["position"]
        if learner.checkpoints is not None:
            target = learner_directory(after.learner.checkpoint.directory, after.run, learner.name)
            copy_checkpoint(learner.checkpoints, learner.step, target, places)
    return positions


def carry_weights(config: RunConfig, after: RunConfig) -> int:
    """Publish the newest policy version of a run, whole, in its successor under the same number; return the number.

    Earlier versions are recorded there without their bytes, so that no number is used twice and the step of each
    version stays known. Safe to repeat. Returns -1 if the run has no version.
    """
    kafka, manifests = config.kafka, read_manifests(config.kafka, config.run, partial(needed, versions=1))
    version = max(manifests, default=-1)
    if version < 0 or version in read_manifests(kafka, after.run, none_whole):
        return version
    newest, weights = manifests[version], config.learner.weights
    with ExitStack() as stack:
        log = stack.enter_context(closing(StepLog(kafka, after.run, newest.learner, take_over=True)))
        log.commit([_record(after, _without_bytes(manifests[number])) for number in sorted(manifests)[:-1]])
        if not newest.chunks:
            log.commit([_record(after, newest)])
            return version
        with ChunkFetcher(kafka, config.run, files_at_once=weights.files_at_once) as fetcher:
            try:
                arrays = load_version(fetcher, manifests, version, timeout_s=weights.fetch_timeout_s)
            except (ChainBroken, ChunksGone, ChunksLate, WeightsRefused) as error:
                raise TopicError(
                    f"policy version {version} of run {config.run} cannot be carried over: {error}"
                ) from error
        publisher = WeightsPublisher(kafka, after.run, newest.learner, newest.model, weights)
        stack.enter_context(closing(publisher))
        digest = params_digest_of(newest)
        manifest = publisher.stage(newest.step, arrays, params_digest=digest, dtype=newest.dtype)
        if manifest.version != version:
            raise StateRefused(f"run {config.run} has no policy version {version - 1}, which comes before its newest")
        log.commit([publisher.record(manifest)])
        publisher.committed(manifest)
    return version


def _record(config: RunConfig, manifest: PolicyManifest) -> tuple[str, bytes, bytes]:
    return topic_name(config.run, "policies"), encode_key(manifest.version), encode(manifest)


def _without_bytes(manifest: PolicyManifest) -> PolicyManifest:
    return replace(manifest, kind="external", base=-1, tensors=(), chunks=())
