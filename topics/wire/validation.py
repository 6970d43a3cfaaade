"""Validates records: producers and grouping apply the same checks.

Pure: each check returns a list of problems, empty if the record is valid.
"""

import math
import numbers
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_origin, get_type_hints

import numpy as np

from rollstream.topics.errors import RecordError, brief
from rollstream.topics.records import (
    BatchIndexEntry,
    BatchTokenArray,
    Bool,
    GroupCancelled,
    Int64,
    JournalRecord,
    NamedArray,
    Rollout,
    SamplingParams,
    TrainingBatch,
    batch_numbers,
)
from rollstream.topics.records.arrays import STORED_NAME, shape_problem
from rollstream.topics.records.fates import FATES
from rollstream.topics.wire.codec import decode_as
from rollstream.topics.wire.media import is_medium, media_problems
from rollstream.topics.wire.rl_examples import IN_THE_RECORD, REFERENCE, SAMPLING_MASK, SAMPLING_MASK_COUNTS, lengths_of

LOGPROB_TOLERANCE = 1e-3
"""Largest positive log-probability that counts as a rounding error (float16 servers reach 5e-4)."""

NO_LOGPROB = -9999.0
"""vLLM's stand-in for a log-probability that JSON cannot represent; a loss would take it for a real one."""

REWARD_LIMIT = 1e30
"""Largest absolute reward: advantages are float32, and sums of squares must stay finite in float64."""

NAME_LIMIT = 512
"""Largest number of characters in a uid, environment or other name, which batches, drops and counts repeat."""

ARRAYS_LIMIT = 256
"""Largest number of named arrays of a rollout."""

OFFSETS_LIMIT = 1 << 24
"""Largest number of offsets in each set of offsets of a journal record; readers hold every offset in memory."""

LAST_OFFSET = 1 << 62
"""Largest valid offset, which no partition reaches; adding to a larger one could overflow."""

UIDS_LIMIT = 4096
"""Largest number of uids in one cancellation; a producer with more uids writes several cancellations."""

_INT_MAX = 2**31 - 1
_DTYPE = re.compile(r"(<[iu][248]|<f[248]|<c(8|16)|\|[biu]1)")
"""Dtypes that exist on every machine; <f16, for example, is missing on many."""

_ACCEPTED: Mapping[Any, type] = {int: numbers.Integral, float: numbers.Real, tuple: Sequence}
"""Types whose values are accepted in place of a documented type; NumPy's numbers are among them."""


def problems(rollout: Rollout) -> list[str]:
    """Return everything wrong with a rollout: lengths, NaN, versions, group and branch counts, spans, named arrays.

    Its fields are of their types, as those of decoded records are; `untyped_problems` takes any values.
    """
    issues = _name_problems(rollout, "uid", "environment", "example_id")
    for name in ("group_id", "episode_uid"):
        if len(getattr(rollout, name)) > NAME_LIMIT:
            issues.append(f"{name} is longer than {NAME_LIMIT} characters")
    issues += _token_problems(rollout)
    if not abs(rollout.reward) <= REWARD_LIMIT:
        issues.append(f"reward is {rollout.reward:g}")
    issues += [f"reward component {k} is {v}" for k, v in rollout.reward_components.items() if not math.isfinite(v)]
    if rollout.policy_version < 0:
        issues.append(f"policy_version is {rollout.policy_version}")
    if not 0 <= rollout.lowest_version <= rollout.highest_version:
        issues.append(
            f"lowest_version {rollout.lowest_version} and highest_version {rollout.highest_version} are not a range"
        )
    if not 0 < rollout.group_size <= _INT_MAX:
        issues.append(f"group_size is {rollout.group_size}")
    if not 0 <= rollout.branch < rollout.branches <= _INT_MAX:
        issues.append(f"branch {rollout.branch} is not among {rollout.branches} branches")
    if rollout.branches > 1 and not rollout.episode_uid:
        issues.append(f"it is one of {rollout.branches} branches but has no episode_uid")
    issues += _sampling_problems(rollout.sampling)
    length = len(rollout.tokens)
    for i, turn in enumerate(rollout.turns):
        if not 0 <= turn.start <= turn.stop <= length:
            issues.append(f"turn {i} covers tokens {turn.start} to {turn.stop} of {length}")
    return issues + arrays_problems(rollout.token_arrays, length)


def cancellation_problems(cancelled: GroupCancelled) -> list[str]:
    """Return everything wrong with a cancellation whose fields are of their types."""
    issues = _name_problems(cancelled, "environment", "example_id")
    if len(cancelled.group_id) > NAME_LIMIT:
        issues.append(f"group_id is longer than {NAME_LIMIT} characters")
    if cancelled.policy_version < 0:
        issues.append(f"policy_version is {cancelled.policy_version}")
    if not 0 < cancelled.group_size <= _INT_MAX:
        issues.append(f"group_size is {cancelled.group_size}")
    if not cancelled.uids or not all(cancelled.uids):
        issues.append("uids is empty, or holds an empty uid")
    if any(len(uid) > NAME_LIMIT for uid in cancelled.uids):
        issues.append(f"uids holds a uid longer than {NAME_LIMIT} characters")
    if len(cancelled.uids) > UIDS_LIMIT:
        issues.append(f"uids holds {len(cancelled.uids)}, and may hold {UIDS_LIMIT}: cancel the others with another")
    return issues


def untyped_problems(record: Rollout | GroupCancelled) -> list[str]:
    """Return everything wrong with a record that other code made, whose fields may hold anything."""
    try:
        return problems(record) if isinstance(record, Rollout) else cancellation_problems(record)
    except (TypeError, AttributeError, ValueError, OverflowError) as error:
        return _type_problems(record) or [f"a field has an impossible value ({brief(error)})"]


def _type_problems(record: object) -> list[str]:
    issues = []
    for name, hint in get_type_hints(type(record)).items():
        documented = get_origin(hint) or hint
        kind = _ACCEPTED.get(documented, documented)
        value = getattr(record, name)
        if isinstance(kind, type) and not isinstance(value, kind):
            issues.append(f"{name} is of type {type(value).__name__} instead of {documented.__name__}")
    return issues


def batch_problems(batch: TrainingBatch) -> list[str]:
    """Return everything wrong with a batch: arrays of wrong lengths, descending splits, missing groups."""
    rows, tokens = len(batch.uids), len(batch.tokens)
    issues = _id_problems(batch.batch_id, batch.partition)
    columns = ("group_index", "source_offsets", "rewards", "truncated", "lowest_versions", "highest_versions")
    for name, expected in (
        *((name, rows) for name in (*columns, "temperatures", "logprobs_processed", "weight_steps", "timestamps")),
        *((name, tokens) for name in ("loss_mask", "logprobs", "advantages")),
        ("splits", rows + 1),
    ):
        length = len(getattr(batch, name))
        if length != expected:
            issues.append(f"{name} has {length} entries for {rows} rows of {tokens} tokens")
    if issues:
        return issues
    if batch.splits[0] != 0 or batch.splits[-1] != tokens or (batch.splits[1:] < batch.splits[:-1]).any():
        issues.append(f"splits do not divide {tokens} tokens")
    if rows and not (batch.group_index.min() >= 0 and batch.group_index.max() < len(batch.groups)):
        issues.append(f"group_index names a group that is not among the {len(batch.groups)} groups")
    return issues + [problem for entry in batch.token_arrays if (problem := _batch_array_problem(entry, batch))]


def _batch_array_problem(entry: BatchTokenArray, batch: TrainingBatch) -> str:
    numbers = entry.rows
    if (entry.array.stored or is_medium(entry.name)) and len(numbers) != 1:
        return f"token array {entry.name} names one object for {len(numbers)} rows"
    # Neighbours are compared, because differences of large numbers may overflow.
    if len(numbers) and (numbers[0] < 0 or numbers[-1] >= len(batch) or (numbers[1:] <= numbers[:-1]).any()):
        return f"token array {entry.name} names rows that do not ascend within the {len(batch)} rows"
    try:
        length = int(lengths_of(entry, batch).sum())
    except RecordError as error:
        return str(error)
    return "; ".join(_array_problems(entry.name, entry.array, length))


def entry_problems(entry: BatchIndexEntry) -> list[str]:
    """Return why an entry of the index cannot name a batch."""
    issues = _id_problems(entry.batch_id, entry.partition)
    return [*issues, f"offset is {entry.offset}"] if entry.offset < 0 else issues


def decode_journal(value: bytes | None) -> JournalRecord:
    """Decode a record of `journal`. Raises RecordError for any other value, and for a record with offsets that no task
    can have read, because readers of such a record would count or hold offsets without limit."""
    record = decode_as(JournalRecord, value)
    ranges = {name: getattr(record, name) for name in ("admitted", "unfinished", "delivered")}
    for name, pairs in (*ranges.items(), *(("finished", finished.runs) for finished in record.finished)):
        if problem := _ranges_problem(pairs):
            raise RecordError(f"a JournalRecord whose {name} {problem}")
    for finished in record.finished:
        if finished.fate not in FATES:
            raise RecordError(f"a JournalRecord with the unknown fate {finished.fate[:40]!r}")
    if any(not 0 <= drop.offset <= LAST_OFFSET for drop in record.drops):
        raise RecordError("a JournalRecord with a drop at an invalid offset")
    least = min(record.partition, record.sequence, record.begin, record.batch_number)
    if least < 0 or not record.begin <= record.position <= LAST_OFFSET:
        raise RecordError(
            f"a JournalRecord with impossible numbers: partition {record.partition}, sequence {record.sequence}, batch "
            f"{record.batch_number}, offsets {record.begin} to {record.position}"
        )
    return record


def _ranges_problem(pairs: Sequence[int] | Int64) -> str:
    flat = np.asarray(pairs, "<i8")
    if len(flat) % 2:
        return f"holds {len(flat)} numbers, which are not pairs of a first offset and a count"
    firsts, counts = flat[::2], flat[1::2]
    if len(flat) and not (
        0 <= firsts.min() <= firsts.max() <= LAST_OFFSET and 1 <= counts.min() <= counts.max() <= OFFSETS_LIMIT
    ):
        return "holds an invalid first offset or count"
    return f"has more than {OFFSETS_LIMIT} offsets" if counts.sum() > OFFSETS_LIMIT else ""


def _id_problems(batch_id: str, partition: int) -> list[str]:
    try:
        expected = batch_numbers(batch_id)[0]
    except RecordError as error:
        return [str(error)]
    return [] if expected == partition else [f"batch id {batch_id} does not match partition {partition}"]


def _name_problems(record: Rollout | GroupCancelled, *names: str) -> list[str]:
    issues = []
    for name in names:
        value = getattr(record, name)
        if not isinstance(value, str):
            issues.append(f"{name} is of type {type(value).__name__} instead of str")
            continue
        length = len(value)
        if not 0 < length <= NAME_LIMIT:
            issues.append(f"{name} has {length} characters; it must have 1 to {NAME_LIMIT}")
    return issues


def _token_problems(rollout: Rollout) -> list[str]:
    issues: list[str] = []
    length = len(rollout.tokens)
    if length == 0:
        issues.append("tokens is empty")
    for name, array in (("loss_mask", rollout.loss_mask), ("logprobs", rollout.logprobs)):
        if len(array) != length:
            issues.append(f"{name} has {len(array)} entries for {length} tokens")
    if len(rollout.token_rewards) not in (0, length):
        issues.append(f"token_rewards has {len(rollout.token_rewards)} entries for {length} tokens")
    # The ufuncs' own reduce costs half as much as the arrays' min and max.
    if length and np.minimum.reduce(rollout.tokens) < 0:
        issues.append("tokens holds a negative id")
    if len(rollout.logprobs):
        least, most = float(np.minimum.reduce(rollout.logprobs)), float(np.maximum.reduce(rollout.logprobs))
        if not (math.isfinite(least) and math.isfinite(most)):
            issues.append("logprobs holds NaN or infinity")
        elif least <= NO_LOGPROB:
            issues.append(f"logprobs holds {least:g}, which stands for an unknown log-probability")
        elif most > LOGPROB_TOLERANCE:
            issues.append(f"logprobs holds {most:g}, above 0")
        elif (
            len(rollout.logprobs) == len(rollout.loss_mask)
            and np.greater(rollout.logprobs != 0, rollout.loss_mask).any()
        ):
            issues.append("logprobs is not 0 where loss_mask is false")
    if len(rollout.token_rewards) and not np.isfinite(rollout.token_rewards).all():
        issues.append("token_rewards holds NaN or infinity")
    return issues


def _sampling_problems(sampling: SamplingParams) -> list[str]:
    issues = []
    if not 0.0 <= sampling.temperature < math.inf:
        issues.append(f"sampling temperature is {sampling.temperature}")
    if not 0.0 <= sampling.top_p <= 1.0 or not 0.0 <= sampling.min_p <= 1.0:
        issues.append(f"sampling top_p is {sampling.top_p} and min_p {sampling.min_p}, which must be 0 to 1")
    return issues


def arrays_problems(arrays: Mapping[str, NamedArray], length: int) -> list[str]:
    """Return everything wrong with the named arrays of a rollout of `length` tokens."""
    if len(arrays) > ARRAYS_LIMIT:
        return [f"it has {len(arrays)} token arrays; it may have at most {ARRAYS_LIMIT}"]
    issues = []
    for name, extra in arrays.items():
        if not 0 < len(name) <= NAME_LIMIT:
            issues.append(f"a token array's name has {len(name)} characters; it must have 1 to {NAME_LIMIT}")
        elif is_medium(name):
            issues += _array_problems(name, extra, extra.shape[0] if extra.shape else 0)
        elif name != SAMPLING_MASK:
            issues += _array_problems(name, extra, length)
    if not issues and SAMPLING_MASK in arrays:
        issues += _mask_problems(arrays[SAMPLING_MASK], arrays.get(SAMPLING_MASK_COUNTS))
    return issues or media_problems(arrays)


def _mask_problems(mask: NamedArray, counts: NamedArray | None) -> list[str]:
    if counts is None or counts.dtype != "<i4" or len(counts.shape) != 1 or mask.dtype != "<i4" or len(mask.shape) != 1:
        return [f"{SAMPLING_MASK} and {SAMPLING_MASK_COUNTS} must both be <i4 with one dimension"]
    numbers = counts.array()
    if numbers.min(initial=0) < 0:
        return [f"{SAMPLING_MASK_COUNTS} holds a negative number"]
    if issues := _array_problems(SAMPLING_MASK, mask, int(numbers.sum(dtype=np.int64))):
        return issues
    negative = not mask.stored and mask.array().min(initial=0) < 0
    return [f"{SAMPLING_MASK} holds a negative id"] if negative else []


def is_masked(loss_mask: Bool, logprobs_mode: str, arrays: Mapping[str, NamedArray]) -> bool:
    """Whether a rollout names, for each sampled token, the tokens among which it was drawn, and its log-probabilities
    are of the distribution over these. Its arrays are valid."""
    if logprobs_mode != "processed" or SAMPLING_MASK not in arrays:
        return False
    return bool((arrays[SAMPLING_MASK_COUNTS].array()[loss_mask] > 0).all())


def _array_problems(name: str, extra: NamedArray, length: int) -> list[str]:
    dtype, shape, size_bytes = extra.dtype, extra.shape, len(extra.data)
    try:
        item = np.dtype(dtype) if _DTYPE.fullmatch(dtype) else None
    except TypeError:
        item = None
    if item is None:
        return [f"token array {name} has dtype {dtype!r}, which is not a little-endian number of numpy"]
    stored = extra.stored
    if stored and (size_bytes or name in IN_THE_RECORD or not STORED_NAME.fullmatch(stored)):
        return [f"token array {name} has {size_bytes} bytes and names the object {stored[:NAME_LIMIT]!r}"]
    fills = bool(stored) or _fills(shape, item.itemsize, size_bytes)
    if not shape or shape[0] != length or min(shape) < 0 or not fills:
        return [f"token array {name} has shape {shape} of {dtype} in {size_bytes} bytes for {length} tokens"]
    if problem := shape_problem(shape, item.itemsize, None if stored else size_bytes):
        return [f"token array {name}: {problem}"]
    if name == REFERENCE and not _is_finite_row(extra, item):
        return [f"token array {name} must hold one finite float32 per token"]
    return []


def _is_finite_row(extra: NamedArray, item: np.dtype[Any]) -> bool:
    if len(extra.shape) != 1 or item.kind != "f":
        return False
    return bool((np.abs(extra.array()) <= np.finfo("<f4").max).all())


def _fills(shape: Sequence[int], itemsize: int, size_bytes: int) -> bool:
    """Whether an array of this shape has exactly `size_bytes`. Stops at the first dimension at which it is larger."""
    if 0 in shape:
        return size_bytes == 0
    room = itemsize
    for dimension in shape:
        room *= dimension
        if room > size_bytes:
            return False
    return room == size_bytes
