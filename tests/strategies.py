"""What hypothesis draws: records of every type, and logs of one partition of `rollouts` where all goes wrong.

Logs come from few environments, examples, versions and uids, so that groups complete, repeat and collide often.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from hypothesis import strategies as st

from consumers.grouping.changes import Record
from consumers.grouping.config import GroupingConfig
from consumers.grouping.testing import example_rollout
from topics import codec, records
from topics.codec import encode
from topics.keys import encode_key, partition_of
from topics.records import GroupCancelled, Mark, Rollout, RolloutMetadata, SamplingParams

# ---------------------------------------------------------------------- records, from their schemas

_INT32 = st.integers(-(2**31), 2**31 - 1)
_INT64 = st.integers(-(2**63), 2**63 - 1)
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_PRIMITIVES: dict[str, st.SearchStrategy[Any]] = {
    "string": _TEXT,
    "int": _INT32,
    "long": _INT64,
    "double": st.floats(),
    "boolean": st.booleans(),
    "bytes": st.binary(max_size=24),
}


def arrays(dtype: str, max_size: int = 12) -> st.SearchStrategy[Any]:
    """One-dimensional arrays of any bits the dtype has (NaNs included)."""
    size = np.dtype(dtype).itemsize
    if dtype == "|b1":
        return st.lists(st.booleans(), max_size=max_size).map(lambda values: np.array(values, dtype))
    return st.integers(0, max_size).flatmap(
        lambda n: st.binary(min_size=n * size, max_size=n * size).map(lambda data: np.frombuffer(data, dtype))
    )


def _of_schema(schema: Any, named: dict[str, Any]) -> st.SearchStrategy[Any]:
    kind = schema if isinstance(schema, str) else schema["type"]
    if isinstance(schema, dict) and schema.get("logicalType") == "ndarray":
        return arrays(schema["dtype"])
    if kind in _PRIMITIVES:
        return _PRIMITIVES[kind]
    if kind in named:
        return _of_schema(named[kind], named)
    if kind == "array":
        return st.lists(_of_schema(schema["items"], named), max_size=3).map(tuple)
    if kind == "map":
        return st.dictionaries(_TEXT, _of_schema(schema["values"], named), max_size=3)
    named[schema["name"]] = schema
    if kind == "enum":
        return st.sampled_from(schema["symbols"])
    values = {f["name"]: _of_schema(f["type"], named) for f in schema["fields"]}
    return st.builds(getattr(records, schema["name"]), **values)


def any_record(cls: type) -> st.SearchStrategy[Any]:
    """Records of a type with any values its newest schema allows, sensible or not."""
    return _of_schema(codec.schemas()[cls.__name__][-1].source, {})


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    """Sound rollouts of up to 20 tokens."""
    length = draw(st.integers(1, 20))
    mask = np.array(draw(st.lists(st.booleans(), min_size=length, max_size=length)), "|b1")
    lowest = draw(st.integers(0, 5))
    logprobs = np.array(draw(st.lists(st.floats(-20, 0, width=32), min_size=length, max_size=length)), "<f4")
    return example_rollout(
        uid=draw(st.text(min_size=1, max_size=8)),
        reward=draw(st.floats(-100, 100)),
        group_size=draw(st.integers(1, 9)),
        policy_version=draw(st.integers(lowest, 6)),
        lowest_version=lowest,
        tokens=np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length)), "<i4"),
        loss_mask=mask,
        logprobs=np.where(mask, logprobs, np.float32(0)),
        truncated=draw(st.booleans()),
    )


# ---------------------------------------------------------------------- logs of one partition

PARTITIONS = 3
PARTITION = 0


def _examples_on(partition: int, count: int) -> list[str]:
    return [e for e in map(str, range(100)) if partition_of(encode_key("a", e), PARTITIONS) == partition][:count]


HERE = _examples_on(PARTITION, 4)
ELSEWHERE = _examples_on(PARTITION + 1, 1)


@dataclass(frozen=True)
class Arrival:
    """A rollout; `flaw` spoils it."""

    example: str
    version: int
    member: int
    reward: float
    group_id: str = ""
    lag: int = 0
    tokens: int = 2
    worker: str = "w"
    size: int = 2
    branches: int = 1
    flaw: Literal["", "nan", "key", "size", "filtered", "no key"] = ""

    def record(self) -> tuple[bytes | None, bytes | None]:
        rollout = example_rollout(
            uid=f"u{self.member}",
            reward=self.reward,
            environment="a",
            example_id=self.example,
            policy_version=self.version,
            lowest_version=max(0, self.version - self.lag),
            group_id=self.group_id,
            group_size=self.size + (self.flaw == "size"),
            tokens=np.arange(self.tokens, dtype="<i4"),
            metadata=RolloutMetadata(worker_id=self.worker),
            sampling=SamplingParams(top_k=10 if self.flaw == "filtered" else 0),
            episode_uid=f"e{self.member // self.branches}" if self.branches > 1 else "",
            branch=self.member % self.branches,
            branches=self.branches,
        )
        if self.flaw == "nan":
            rollout = replace(rollout, reward=float("nan"))
        key = None if self.flaw == "no key" else encode_key("b" if self.flaw == "key" else "a", self.example)
        return key, encode(rollout)


@dataclass(frozen=True)
class Cancellation:
    """A cancellation of members; none named is senseless."""

    example: str
    version: int
    members: tuple[int, ...]
    group_id: str = ""
    size: int = 2

    def record(self) -> tuple[bytes | None, bytes | None]:
        cancelled = GroupCancelled(
            environment="a",
            example_id=self.example,
            policy_version=self.version,
            group_id=self.group_id,
            group_size=self.size,
            uids=tuple(f"u{member}" for member in self.members),
        )
        return encode_key("a", self.example), encode(cancelled)


@dataclass(frozen=True)
class Marked:
    """A mark; a configuration mark takes the given configuration under its generation."""

    kind: Literal["deadline", "policy_version", "drain", "configuration"]
    policy_version: int = -1
    config: GroupingConfig | None = None

    def record(self) -> tuple[bytes | None, bytes | None]:
        generation = self.config.generation if self.config else -1
        text = self.config.to_json() if self.config else "{not json"
        mark = Mark(kind=self.kind, policy_version=self.policy_version, generation=generation, configuration=text)
        return encode_key("mark", self.kind), encode(mark)


@dataclass(frozen=True)
class Poison:
    """Bytes that mean nothing here."""

    value: bytes | None

    def record(self) -> tuple[bytes | None, bytes | None]:
        return None, self.value


@dataclass(frozen=True)
class Event:
    """Something appended: after `wait_ms` by the broker's clock (which may step back), `gap` offsets further on."""

    what: Arrival | Cancellation | Marked | Poison
    wait_ms: int = 0
    gap: int = 0


@lru_cache(maxsize=4096)
def _record(what: Arrival | Cancellation | Marked | Poison) -> tuple[bytes | None, bytes | None]:
    return what.record()


Then = Literal["", "commit", "snapshot", "crash"]


@dataclass(frozen=True)
class Log:
    """A log, the configuration it starts under, and what happens to the task after each record."""

    config: GroupingConfig
    events: tuple[Event, ...]
    then: tuple[Then, ...] = field(repr=True)
    policy_version: int = 0

    def records(self) -> list[Record]:
        """The log as the broker would hold it."""
        found, offset, now = [], -1, 1_000
        for event in self.events:
            offset += 1 + event.gap
            now = max(0, now + event.wait_ms)
            found.append(Record(offset, now, *_record(event.what)))
        return found


_SECONDS = st.sampled_from([100.0, 100.0, 100.0, 0.001, 0.02, 0.1, 0.4])


def configs(makers: Sequence[str] = ("fifo",), generation: int = 0) -> st.SearchStrategy[GroupingConfig]:
    """Configurations with numbers so small that every rule triggers within tens of records."""
    return st.builds(
        GroupingConfig,
        generation=st.just(generation),
        estimator=st.sampled_from(["rloo", "grpo"]),
        maker=st.sampled_from(makers),
        seed=st.integers(0, 1),
        batch_rollouts=st.integers(1, 6),
        batch_bytes=st.sampled_from([10_000, 10_000, 10_000, 330, 500, 1_000]),
        max_batch_age_s=_SECONDS,
        min_group_size=st.sampled_from([0, 0, 0, 1, 2, 3]),
        group_deadline_s=_SECONDS,
        max_policy_lag=st.sampled_from([-1, -1, 3, 1, 0]),
        max_age_s=st.sampled_from([-1.0, -1.0, -1.0, 0.0, 0.05, 0.2]),
        future_deadline_s=_SECONDS,
        capacity_bytes=st.sampled_from([100_000, 100_000, 100_000, 300, 900, 1_500]),
        horizon_s=_SECONDS,
        drop_superseded=st.booleans(),
        allow_filtered_sampling=st.booleans(),
        exclude_environments=st.sampled_from([(), (), (), (), (), (), ("b",), ("a",)]),
        exclude_workers=st.sampled_from([(), (), (), ("bad",)]),
    )


_EXAMPLES = st.sampled_from(HERE)
_VERSIONS = st.integers(0, 3)
_GROUP_IDS = st.sampled_from(["", "", "g"])
_FLAWS = st.sampled_from(["nan", "key", "size", "filtered", "no key"])

arrivals = st.builds(
    Arrival,
    example=_EXAMPLES,
    version=_VERSIONS,
    member=st.integers(0, 2),
    reward=st.sampled_from([0.0, 1.0, 0.5]),
    group_id=_GROUP_IDS,
    lag=st.sampled_from([0, 0, 1, 2]),
    tokens=st.integers(1, 12),
    worker=st.sampled_from(["w", "w", "w", "bad"]),
)
_branched = st.builds(replace, arrivals, member=st.integers(0, 5), branches=st.just(2))
_flawed = st.builds(replace, arrivals, flaw=_FLAWS)
_misplaced = st.builds(replace, arrivals, example=st.sampled_from(ELSEWHERE))
_cancellations = st.builds(
    Cancellation,
    example=st.sampled_from([*HERE, *HERE, *HERE, *ELSEWHERE]),
    version=_VERSIONS,
    members=st.lists(st.integers(0, 2), max_size=2).map(tuple),
    group_id=_GROUP_IDS,
)
_poison = st.builds(
    Poison, st.one_of(st.none(), st.binary(max_size=6), st.binary(max_size=6).map(lambda tail: b"\xc3\x01" + tail))
)


def _marks(makers: Sequence[str]) -> st.SearchStrategy[Marked]:
    generations = st.integers(0, 4).flatmap(lambda generation: configs(makers, generation))
    return st.one_of(
        st.just(Marked("deadline")),
        st.builds(Marked, st.just("policy_version"), policy_version=st.integers(-1, 4)),
        st.builds(Marked, st.just("policy_version"), policy_version=st.integers(-1, 4)),
        st.just(Marked("drain")),
        st.builds(Marked, st.just("configuration"), config=st.one_of(generations, generations, st.none())),
    )


def events(makers: Sequence[str] = ("fifo",)) -> st.SearchStrategy[Event]:
    """Anything that may be appended to `rollouts`."""
    what: list[st.SearchStrategy[Any]] = [arrivals] * 9
    what += [_branched, _flawed, _misplaced, _cancellations, _poison, _marks(makers), _marks(makers)]
    return st.builds(
        Event,
        what=st.one_of(*what),
        wait_ms=st.sampled_from([0, 0, 0, 0, 1, 10, 30, 120, 500, -20, -300]),
        gap=st.sampled_from([0, 0, 0, 0, 1, 3]),
    )


def logs(makers: Sequence[str] = ("fifo",), max_size: int = 60) -> st.SearchStrategy[Log]:
    """Logs, with commits, snapshots and crashes between their records."""
    then: st.SearchStrategy[Then] = st.sampled_from(["", "", "", "commit", "commit", "snapshot", "crash"])
    return st.builds(
        lambda config, steps, version: Log(
            config, tuple(e for e, _ in steps), tuple(t for _, t in steps), policy_version=version
        ),
        configs(makers),
        st.lists(st.tuples(events(makers), then), max_size=max_size),
        st.sampled_from([-1, 0, 0, 1]),
    )
