"""Rollouts made of the samples of a TransferQueue, by names of fields; verl's names are the default.

The same samples always give the same rollouts with the same uids, so that a topic can be read again.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError, RecordError
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import Rollout, SampleField, SamplesCleared
from rollstream.topics.records.arrays import dtype_of
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.rollout_batch_upcast import PLACE
from rollstream.topics.wire.validation import problems


@dataclass(frozen=True, kw_only=True)
class FieldNames:
    """Which field of a sample holds what; those of one prompt's samples that are compared have one `group`."""

    prompt: str = "prompts"
    response: str = "responses"
    mask: str = "response_mask"
    """Optional; 1 for tokens of the policy. Without it, all of the response is."""
    logprobs: str = "rollout_log_probs"
    reward: str = "rm_scores"
    """A number, or one for each token, which are added."""
    group: str = "uid"
    """Optional; without it, a sample is a group of its own."""
    environment: str = "data_source"
    """Optional; without it, the environment is `samples`."""
    version: str = "policy_version"
    """Optional; without it, the version is 0."""

    @classmethod
    def of(cls, words: list[str]) -> "FieldNames":
        """Parse `reward=scores` and the like. Raises ConfigurationError."""
        known, given = asdict(cls()), dict(word.partition("=")[::2] for word in words)
        if unknown := sorted(name for name in given if name not in known or not given[name]):
            raise ConfigurationError(f"--field {unknown[0]}: give NAME=FIELD, with a name of {', '.join(known)}")
        return cls(**given)


class SampleRollout(NamedTuple):
    """The rollout that a sample makes, or the reason why it makes none."""

    place: str
    """Permanent name of the sample's last record."""
    rollout: Rollout | None
    reason: str = ""


def sample_rollouts(kafka: KafkaConfig, run: str, names: FieldNames) -> Iterator[SampleRollout]:
    """Yield what each sample of a run makes, in the order in which they were cleared, then those that are in the queue.

    A sample that was cleared and put again counts twice. The log is read twice, because each rollout tells the size of
    its group: the number of valid samples that have the same partition, group and environment; they get the lowest of
    their versions.
    """
    sizes: Counter[str] = Counter()
    versions: dict[str, int] = {}
    for _place, rollout, _reason in _converted(kafka, run, names):
        if rollout is not None:
            sizes[rollout.group_id] += 1
            version = rollout.policy_version
            versions[rollout.group_id] = min(versions.get(rollout.group_id, version), version)
    for place, rollout, reason in _converted(kafka, run, names):
        group = "" if rollout is None else rollout.group_id
        if rollout is not None and group in sizes:
            rollout = replace(rollout, group_size=sizes[group], policy_version=versions[group])
        yield SampleRollout(place, rollout, reason)


def _converted(kafka: KafkaConfig, run: str, names: FieldNames) -> Iterator[SampleRollout]:
    for place, (partition_id, sample), fields in _lives(kafka, run):
        try:
            rollout = _rollout(place, partition_id, sample, fields, names)
            issues = problems(rollout)
        except (RecordError, TypeError, ValueError, LookupError) as error:
            issues = [str(error)]
        yield SampleRollout(place, None, "; ".join(issues)) if issues else SampleRollout(place, rollout)


def _lives(kafka: KafkaConfig, run: str) -> Iterator[tuple[str, tuple[str, str], dict[str, SampleField]]]:
    """Yield place, name and fields of each sample, once it is cleared or at the end of the log."""
    live: dict[tuple[str, str], tuple[str, dict[str, SampleField]]] = {}
    for message, record in SkippedRecords("samples").records(object, read_to_end(kafka, topic_name(run, "samples"))):
        if isinstance(record, SampleField):
            sample = record.partition_id, record.sample
            fields = live.get(sample, ("", {}))[1] | {record.field: record}
            live[sample] = f"{message.topic}:{message.partition}:{message.offset}", fields
        elif isinstance(record, SamplesCleared):
            for name in record.samples:
                sample = record.partition_id, name
                if sample in live:
                    yield live[sample][0], sample, live.pop(sample)[1]
    for sample, (place, fields) in live.items():
        yield place, sample, fields


def _rollout(
    place: str, partition_id: str, sample: str, fields: Mapping[str, SampleField], names: FieldNames
) -> Rollout:
    """Raises RecordError, TypeError, ValueError or LookupError for a sample that makes none."""
    needed = (names.prompt, names.response, names.logprobs, names.reward)
    if missing := [name for name in needed if name not in fields]:
        raise RecordError(f"it lacks {', '.join(missing)}")
    prompt, response, logprobs, reward = (_numbers(fields[name]) for name in needed)
    mask = _numbers(fields[names.mask]).astype(bool) if names.mask in fields else np.ones(len(response), bool)
    for name, array in ((names.logprobs, logprobs), (names.mask, mask)):
        if len(array) != len(response):
            raise RecordError(f"{name} has {len(array)} values for {len(response)} tokens of {names.response}")
    none = np.zeros(len(prompt))
    version = int(_plain(fields[names.version])) if names.version in fields else 0
    example = str(_plain(fields[names.group])) if names.group in fields else sample
    environment = str(_plain(fields[names.environment])) if names.environment in fields else "samples"
    return Rollout(
        uid=f"{partition_id}/{sample}@{place}",
        group_id=f"{partition_id}/{example}/{environment}",
        group_size=1,
        environment=environment,
        example_id=example,
        policy_version=version,
        lowest_version=version,
        highest_version=version,
        tokens=np.concatenate([prompt, response]).astype(np.int32),
        loss_mask=np.concatenate([none.astype(bool), mask]),
        logprobs=np.concatenate([none, np.where(mask, logprobs, 0.0)]).astype(np.float32),
        reward=float(reward.sum()),
        extra={PLACE: place},
    )


def _numbers(field: SampleField) -> NDArray[Any]:
    """Return the numbers of a field, flat."""
    if field.dtype:
        # Numpy lacks some of torch's dtypes.
        kind = dtype_of(field.dtype) if field.dtype.startswith(("bfloat", "float8")) else np.dtype(field.dtype)
        return np.frombuffer(field.data, kind).astype(np.float64 if kind.kind not in "biu" else kind)
    return np.atleast_1d(np.asarray(_plain(field), np.float64)).reshape(-1)


def _plain(field: SampleField) -> Any:
    """Return the text or number of a field. Raises ValueError for a tensor of several numbers."""
    if field.dtype:
        return _numbers(field).item()
    return msgspec.msgpack.decode(field.data, ext_hook=lambda _code, data: bytes(data))
