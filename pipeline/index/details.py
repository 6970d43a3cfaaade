"""Details of one rollout: turns, a range of tokens, group, fate and lineage, from the index and the record."""

import math
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rollstream.pipeline.command_line.plain_values import array_text
from rollstream.pipeline.index.indexed_run import IndexedRun, RolloutPlace
from rollstream.pipeline.index.lineage import fate_node, record_lineage
from rollstream.pipeline.index.rollout_query import rows_of
from rollstream.pipeline.index.rollout_rows import finite
from rollstream.topics.errors import RecordError, TopicError
from rollstream.topics.records import NamedArray, Rollout, TrainingBatch, Turn
from rollstream.topics.wire.codec import decode
from rollstream.topics.wire.media import Medium, media_of
from rollstream.topics.wire.rl_examples import REFERENCE

TOKENS = 20_000
"""Maximum number of tokens in one answer."""
VERSIONS = "weight_version"
"""Array of a rollout's `token_arrays` with the version that sampled each token."""
_MOST_MEMBERS = 1000


def details(db: sqlite3.Connection, view: IndexedRun, place: RolloutPlace, tokens_from: int = 0) -> dict[str, Any]:
    """Return everything about one rollout. Raises TopicError if the index or the log has no rollout at this place."""
    row_id = id_at(db, place)
    rollout = _rollout(view, place)
    fate = view.fate(place)
    batch = view.batch_of(place, fate)
    return {
        "row": rows_of(db, [row_id])[0],
        "turns": [_turn(turn) for turn in rollout.turns],
        "media": [
            {"number": medium.number, "text": str(medium), "digest": medium.digest, "start": medium.start}
            for medium in media_of(rollout.token_arrays)
        ],
        "tokens": _tokens(rollout, batch, place, max(tokens_from, 0), view.token_texts),
        "components": {name: finite(value) for name, value in rollout.reward_components.items()},
        "sampling": _sampling(rollout),
        "extra": dict(rollout.extra),
        "arrays": {name: array_text(array) for name, array in sorted(rollout.token_arrays.items())},
        "group": rows_of(db, members_of(db, row_id)),
        "fate": fate_node(view, place, fate, batch).as_dict(),
        "lineage": [record_lineage(view, place).as_dict()],
    }


def medium(view: IndexedRun, place: RolloutPlace, number: int) -> Medium:
    """Return an image of a rollout. Raises TopicError if the log has no rollout at this place, or it has fewer."""
    media = media_of(_rollout(view, place).token_arrays)
    if not 0 <= number < len(media):
        raise TopicError(f"rollouts {place} has {len(media)} images, and none of number {number}")
    return media[number]


def id_at(db: sqlite3.Connection, place: RolloutPlace) -> int:
    """Return the id of the row of a place. Raises TopicError if the index has no such row."""
    row = db.execute(
        "select id from rollouts where partition = ? and offset = ?", (place.partition, place.offset)
    ).fetchone()
    if row is None:
        raise TopicError(f"the index has no record of rollouts at {place}; it was pruned, or is not read yet")
    return int(row[0])


def members_of(db: sqlite3.Connection, row_id: int) -> list[int]:
    """Return the ids of the members of a rollout's group, including the rollout itself, in the order of the log."""
    answer = db.execute(
        "select id from rollouts where grp = (select grp from rollouts where id = ?) order by id limit ?",
        (row_id, _MOST_MEMBERS),
    )
    return [number for (number,) in answer] or [row_id]


def _rollout(view: IndexedRun, place: RolloutPlace) -> Rollout:
    message = view.record("rollouts", *place)
    try:
        record = decode(message.value)
    except RecordError as error:
        raise TopicError(f"rollouts {place} cannot be read: {error}") from error
    if not isinstance(record, Rollout):
        raise TopicError(f"rollouts {place} is a {type(record).__name__}, not a rollout")
    return record


def _turn(turn: Turn) -> dict[str, Any]:
    return {
        "role": turn.role,
        "text": turn.text,
        "start": turn.start,
        "stop": turn.stop,
        "reward": finite(turn.reward),
        "model_version": turn.inference.model_version,
        "sampling": dict(turn.inference.sampling_params),
        "has_logprobs": turn.has_logprobs,
    }


def _sampling(rollout: Rollout) -> dict[str, Any]:
    sampling = rollout.sampling
    return {
        "temperature": finite(sampling.temperature),
        "top_p": finite(sampling.top_p),
        "top_k": sampling.top_k,
        "min_p": finite(sampling.min_p),
        "logprobs_mode": rollout.logprobs_mode,
    }


def _tokens(
    rollout: Rollout,
    batch: TrainingBatch | None,
    place: RolloutPlace,
    begin: int,
    texts: Callable[[Sequence[int]], list[str] | None],
) -> dict[str, Any]:
    """Return tokens from a position on; only sampled tokens have log-probabilities, advantages, ratios and versions."""
    total = len(rollout.tokens)
    window = slice(begin, min(begin + TOKENS, total))
    count, ids = max(window.stop - window.start, 0), rollout.tokens[window].tolist()
    mask = _over(rollout.loss_mask[window].tolist(), count)
    logprobs = _masked(_over(rollout.logprobs[window].tolist(), count), mask)
    return {
        "ids": ids,
        "texts": texts(ids),
        "mask": [int(bool(sampled)) for sampled in mask],
        "logprobs": logprobs,
        "advantages": _masked(_advantages(batch, place, total)[window], mask),
        "ratios": _ratios(rollout, window, logprobs),
        "versions": _masked(_versions(rollout)[window], mask),
        "token_rewards": [finite(value) for value in _over(rollout.token_rewards[window].tolist(), count)],
        "total": total,
        "from": begin,
    }


def _over(values: list[Any], count: int) -> list[Any]:
    """Return a value for each token, because arrays of an invalid rollout may be shorter or longer than its tokens."""
    return [*values[:count], *[None] * (count - len(values))]


def _masked(values: Sequence[Any], mask: Sequence[bool]) -> list[Any]:
    return [
        (finite(value) if isinstance(value, float) else value) if sampled else None
        for value, sampled in zip(values, mask, strict=True)
    ]


def _advantages(batch: TrainingBatch | None, place: RolloutPlace, total: int) -> list[float | None]:
    if batch is None:
        return [None] * total
    row = batch.source_offsets.tolist().index(place.offset)
    values: list[float | None] = batch.advantages[int(batch.splits[row]) : int(batch.splits[row + 1])].tolist()
    return values if len(values) == total else [None] * total


def _versions(rollout: Rollout) -> list[int | None]:
    """Return the version that sampled each token: as named for the token, else for its turn, else for the rollout."""
    total = len(rollout.tokens)
    named = _array(rollout.token_arrays.get(VERSIONS), total)
    if named is not None:
        return [int(version) if math.isfinite(version) else None for version in named]
    versions = np.full(total, rollout.policy_version, "<i8")
    for turn in rollout.turns:
        if turn.inference.model_version >= 0 and 0 <= turn.start <= turn.stop:
            versions[turn.start : turn.stop] = turn.inference.model_version
    return list(versions.tolist())


def _ratios(rollout: Rollout, window: slice, logprobs: Sequence[float | None]) -> list[float | None]:
    """Return, for each token, the ratio of its probability under the reference policy to its sampling probability."""
    reference = _array(rollout.token_arrays.get(REFERENCE), len(rollout.tokens))
    if reference is None:
        return [None] * len(logprobs)
    return [
        None if sampled is None else finite(math.exp(max(min(float(value) - sampled, 50.0), -50.0)))
        for value, sampled in zip(reference[window], logprobs, strict=True)
    ]


def _array(named: NamedArray | None, total: int) -> list[float] | None:
    """Return the values of an array over the tokens; None if it is missing or has another shape."""
    if named is None:
        return None
    try:
        array = named.array()
    except RecordError:
        return None
    return array.tolist() if array.shape == (total,) and array.dtype.kind in "fiu" else None
