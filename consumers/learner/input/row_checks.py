"""Finds the rows of a batch that a learner cannot train on, so that a bad rollout does not end its step.

The rows left out depend on the batch and the settings alone, so they are the same in every process. A step on record
leaves out the rows that its record names.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.objective import in_pairs
from rollstream.consumers.learner.training.packing import NO_PAIRS
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.records import TrainingBatch
from rollstream.topics.records.fates import MISSING_ARRAY, Skip
from rollstream.topics.wire.media import is_medium
from rollstream.topics.wire.rl_examples import ROUTED_EXPERTS, SAMPLING_MASK

LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 100.0
"""Range of temperatures that are trained on: a temperature divides the logits and the gradient of every token."""
_FINITE = float(np.finfo("<f4").min), float(np.finfo("<f4").max)
"""Lowest and highest finite log-probability."""
_MOST_NAMED = 20


def unfit_rows(batch: TrainingBatch, config: LearnerConfig) -> dict[Skip, tuple[int, ...]]:
    """Rows that cannot be trained on, by reason: each row under the first reason that applies. The codes are in
    `ROW_CODES`."""
    unfit: dict[Skip, tuple[int, ...]] = {}
    known = np.zeros(len(batch), bool)
    for code, text, rows in _checks(batch, config):
        new = rows & ~known
        if new.any():
            unfit[Skip(code, f"left out as {code}: {text}")] = tuple(np.flatnonzero(new).tolist())
            known |= new
    if in_pairs(config.loss) and len(batch):
        for code, text, rows in _pair_checks(batch, config, known):
            if rows.any():
                unfit[Skip(code, f"left out as {code}: {text}")] = tuple(np.flatnonzero(rows).tolist())
    return unfit


def _pair_checks(
    batch: TrainingBatch, config: LearnerConfig, known: NDArray[np.bool_]
) -> list[tuple[str, str, NDArray[np.bool_]]]:
    """Code, text and failing rows, bool [rows], of what only a loss in pairs needs; rows that are `known` to be unfit
    do not fail again. Raises ConfigurationError for a batch of another maker."""
    if len(batch) % 2 or (batch.group_index[::2] != batch.group_index[1::2]).any():
        raise ConfigurationError(NO_PAIRS)
    trained, lengths = batch.loss_mask.copy(), np.diff(batch.splits)
    trained[batch.splits[:-1][lengths > 0]] = False
    gone = known | ~_any_of_rows(trained, batch.splits)
    if not config.loss.recipe.train_truncated:
        gone |= batch.truncated
    alone = np.repeat(gone.reshape(-1, 2).any(axis=1), 2) & ~known
    long = np.repeat(lengths.reshape(-1, 2).sum(axis=1) > config.sequence_length, 2) & ~known & ~alone
    if config.too_long == "error":
        long[:] = False
    return [
        ("unpaired", "one of a pair of which the other is left out, or has no trained token", alone),
        ("too_long", f"one of a pair longer than learner.sequence_length {config.sequence_length}", long),
    ]


def nothing_to_train_on(learner: str, step: int, reasons: Counter[str], batches: Sequence[str]) -> ConfigurationError:
    """Return the error of a step without a token to train on: the number of its rollouts by reason, and its batches."""
    causes = "; ".join(f"{rows} {reason}" for reason, rows in reasons.most_common())
    return ConfigurationError(
        f"step {step} of learner {learner!r} has no token to train on: of its rollouts, {causes}. "
        "Nothing of the step was published; change the setting that leaves its rollouts out, or exclude the "
        f"rollouts of its batches ({', '.join(batches[:_MOST_NAMED])}): `rollstream lineage --batch ID` names the "
        "offsets of each, and `rollstream steer exclude --offsets P:A-B` excludes them"
    )


def _checks(batch: TrainingBatch, config: LearnerConfig) -> list[tuple[str, str, NDArray[np.bool_]]]:
    """Code, text and failing rows, bool [rows], of every check."""
    lengths, none = np.diff(batch.splits), np.zeros(len(batch), bool)

    def any_trained(tokens: NDArray[np.bool_]) -> NDArray[np.bool_]:
        # The first token of a rollout has no context and is never trained.
        trained = tokens & batch.loss_mask
        trained[batch.splits[:-1][lengths > 0]] = False
        return _any_of_rows(trained, batch.splits)

    def beyond_limit(advantages: NDArray[np.float32]) -> NDArray[np.bool_]:
        by_token = advantages if len(advantages) == len(batch.tokens) else np.repeat(advantages, lengths)
        return any_trained(~(np.abs(by_token) <= config.advantage_limit))

    # Greedy sampling is written as temperature 0 and trained at 1; raw log-probabilities are at temperature 1.
    temperatures = np.where(batch.logprobs_processed & (batch.temperatures != 0), batch.temperatures, 1.0)
    vocabulary, limit = config.model.vocab_size, config.advantage_limit
    # Nearly every batch is within all bounds; its least and greatest values show this without a check of each row.
    checks = [
        (
            "vocabulary",
            f"token ids that are not below the model's vocabulary of {vocabulary}",
            none
            if _within(batch.tokens, 0, vocabulary - 1)
            else _any_of_rows((batch.tokens < 0) | (batch.tokens >= vocabulary), batch.splits),
        ),
        (
            "temperature",
            f"a temperature that is not between {LOWEST_TEMPERATURE:g} and {HIGHEST_TEMPERATURE:g}",
            ~((temperatures >= LOWEST_TEMPERATURE) & (temperatures <= HIGHEST_TEMPERATURE)),
        ),
        (
            "logprobs",
            "log-probabilities that are not finite",
            none if _within(batch.logprobs, *_FINITE) else any_trained(~np.isfinite(batch.logprobs)),
        ),
        (
            "advantage",
            f"advantages beyond learner.advantage_limit {limit:g}",
            none if _within(batch.advantages, -limit, limit) else beyond_limit(batch.advantages),
        ),
    ]
    if config.reference == "carried":
        reference = batch.reference_logprobs
        checks.append(
            (
                "reference",
                'no finite reference log-probabilities, where learner.reference is "carried"',
                any_trained(~np.isfinite(reference)) if len(reference) else np.ones(len(batch), bool),
            )
        )
    if media := {int(row) for entry in batch.token_arrays if is_medium(entry.name) for row in entry.rows}:
        rows = np.isin(np.arange(len(batch)), list(media))
        checks.append(("media", "images, which the learner's models do not read", rows))
    if replayed_arrays(config):
        text = "an array that is missing in its store, or damaged there"
        checks.append((MISSING_ARRAY, text, rows_without_arrays(batch, config)))
    if config.replays_routing:
        layers, several = config.model.num_hidden_layers, config.model.num_experts_per_tok
        checks.append(
            (
                "experts",
                f"{ROUTED_EXPERTS} that do not name {several} experts in each of {layers} layers for each token",
                _other_experts(batch, layers * several),
            )
        )
    if config.too_long in ("refuse", "skip"):
        checks.append(
            (
                "too_long",
                f"longer than learner.sequence_length {config.sequence_length}",
                lengths > config.sequence_length,
            )
        )
    return checks


def replayed_arrays(config: LearnerConfig) -> tuple[str, ...]:
    """Return the names of arrays of rollouts that the learner needs, and that may lie in a store."""
    experts = (ROUTED_EXPERTS,) if config.replays_routing else ()
    return experts if all(loss.name == "ce" for loss in config.every_loss) else (*experts, SAMPLING_MASK)


def rows_without_arrays(batch: TrainingBatch, config: LearnerConfig) -> NDArray[np.bool_]:
    """Whether a row still names an array in a store that the learner needs, bool [rows]: it could not be fetched."""
    lacking, needed = np.zeros(len(batch), bool), replayed_arrays(config)
    for entry in batch.token_arrays:
        if entry.array.stored and entry.name in needed:
            lacking[entry.rows] = True
    return lacking


def _other_experts(batch: TrainingBatch, each: int) -> NDArray[np.bool_]:
    """Whether a row names other than `each` experts for each token, bool [rows]; False for rows that name none."""
    other = np.zeros(len(batch), bool)
    for entry in batch.token_arrays:
        if entry.name == ROUTED_EXPERTS:
            unsigned = entry.array.dtype in ("|u1", "<u2")
            other[entry.rows] = not unsigned or math.prod(entry.array.shape[1:]) != each
    return other


def _within(values: NDArray[Any], least: float, greatest: float) -> bool:
    """Whether all values lie between two bounds; NaN does not."""
    return not len(values) or bool(np.minimum.reduce(values) >= least and np.maximum.reduce(values) <= greatest)


def _any_of_rows(tokens: NDArray[np.bool_], splits: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether any token of a row is set, bool [rows]."""
    counts = np.concatenate([[0], np.cumsum(tokens)])
    rows: NDArray[np.bool_] = counts[splits[1:]] > counts[splits[:-1]]
    return rows
