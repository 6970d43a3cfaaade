"""Strategies of hypothesis: records of every type, and logs of one partition of `rollouts` where everything goes wrong.

Logs come from few environments, examples, versions and uids, so that groups complete, repeat and collide often.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from random import Random
from typing import Any, Literal

import numpy as np
from hypothesis import strategies as st

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core.effects import InputRecord
from rollstream.consumers.grouping.testing import example_rollout
from rollstream.topics import records
from rollstream.topics.records import GroupCancelled, Mark, Rollout, RolloutMetadata, SamplingParams
from rollstream.topics.wire import codec
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key, partition_of

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
    """A cancellation of members; one that names none is senseless."""

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

    @classmethod
    def of(
        cls, config: GroupingConfig, steps: Sequence[tuple[tuple[Event, ...], Then]], policy_version: int = 0
    ) -> "Log":
        """A log of steps; what happens after a step happens after each of its events."""
        events = tuple(event for together, _then in steps for event in together)
        then = tuple(after for together, after in steps for _event in together)
        return cls(config, events, then, policy_version)

    def records(self) -> list[InputRecord]:
        """The log as the broker would hold it."""
        collected, offset, now = [], -1, 1_000
        for event in self.events:
            offset += 1 + event.gap
            now = max(0, now + event.wait_ms)
            collected.append(InputRecord(offset, now, *_record(event.what)))
        return collected


# Tables drawn once from a fixed seed, simplest first: a step of a log is then one draw, which keeps hypothesis fast and
# its logs long and mixed, and lets them shrink towards what is simple.

_SECONDS = (0.001, 0.02, 0.1, 0.4)
_TIGHT: dict[str, Sequence[Any]] = {
    "batch_bytes": (300, 500, 1_000),
    "max_batch_age_s": _SECONDS,
    "min_group_size": (1, 2, 3),
    "group_deadline_s": _SECONDS,
    "max_policy_lag": (0, 1, 3),
    "max_age_s": (0.0, 0.05, 0.2),
    "future_deadline_s": _SECONDS,
    "capacity_bytes": (1_500, 7_000, 14_000, 30_000),
    "remembered_bytes": (0, 1_000, 3_000),
    "horizon_s": _SECONDS,
    "drop_superseded": (True,),
    "allow_filtered_sampling": (True,),
    "exclude_environments": (("a",), ("b",)),
    "exclude_workers": (("bad",),),
    "exclude_offsets": (("0:0-9",), ("0:5", "0:20-40"), ("1:3-30",)),
    "estimator": ("grpo", "opo", "reinforce_pp", "best"),
    "seed": (1,),
    "quotas": (
        ("a:open_groups=1",),
        ("b:open_groups=2", "a:held_bytes=4000"),
        ("b:held_bytes=2000", "a:bytes_per_s=30"),
        ("a:bytes_per_s=20", "b:bytes_per_s=90"),
    ),
}
"""Settings so narrow that they trigger within tens of records; a configuration has a few of them."""


def _config(random: Random, makers: Sequence[str], generation: int, tight: int) -> GroupingConfig:
    narrow = {name: random.choice(_TIGHT[name]) for name in random.sample(list(_TIGHT), tight)}
    wide = {"max_policy_lag": -1, "batch_bytes": 10_000, "capacity_bytes": 10**6, "max_batch_age_s": 5.0}
    return GroupingConfig(
        **{**wide, **narrow},
        generation=generation,
        maker=random.choice(makers),
        batch_rollouts=random.choice((2, 3, 4, 6)),
    )


_SIZES = {"t": 3}
"""Declared size of the groups of an id, where it is not 2."""


def _arrival(random: Random) -> Arrival:
    group_id = random.choice(("", "", "", "", "", "", "g", "t"))
    three = group_id == "t"
    member = random.choice((0, 1, 2) if three else (0, 0, 0, 1, 1, 1, 2))
    return Arrival(
        example=random.choice(HERE[:1] if three else HERE),
        version=random.choice((0, 0, 1) if three else (0, 0, 0, 1, 1, 2, 3)),
        member=member,
        # The middle one of three has no advantage.
        reward=member / 2 if three else random.choice((0.0, 1.0, 0.5, 0.25)),
        group_id=group_id,
        size=_SIZES.get(group_id, 2),
        lag=random.choice((0, 0, 0, 1, 2)),
        tokens=random.randint(1, 12),
        worker=random.choice(("w", "w", "w", "w", "bad")),
    )


def _cancellation(random: Random) -> Cancellation:
    group_id = random.choice(("", "", "g", "t"))
    return Cancellation(
        example=random.choice((*HERE * 3, *ELSEWHERE)),
        version=random.choice((0, 1, 2)),
        members=tuple(random.choices((0, 1, 2), k=random.choice((0, 1, 1, 1, 2, 2)))),
        group_id=group_id,
        size=_SIZES.get(group_id, 2),
    )


def _poison(random: Random) -> Poison:
    return Poison(random.choice((None, b"", random.randbytes(5), codec.MAGIC + random.randbytes(12))))


def _marked(random: Random, makers: Sequence[str]) -> Marked:
    kind = random.choice(("deadline", "deadline", "policy_version", "policy_version", "drain", "configuration"))
    if kind == "policy_version":
        return Marked("policy_version", policy_version=random.choice((-1, 0, 1, 1, 2, 2, 3, 4)))
    if kind == "configuration" and random.random() < 0.9:
        return Marked("configuration", config=_config(random, makers, random.randint(0, 4), random.randint(0, 3)))
    return Marked(kind)


def _event(random: Random, makers: Sequence[str], wildness: float) -> Event:
    """An arrival or, with a probability of `wildness`, something else that can come."""
    arrival = _arrival(random)
    what: Arrival | Cancellation | Marked | Poison = arrival
    if random.random() < wildness:
        what = random.choice(
            (
                replace(arrival, member=random.randrange(6), branches=2),
                replace(arrival, flaw=random.choice(("nan", "key", "size", "filtered", "no key"))),
                replace(arrival, example=random.choice(ELSEWHERE)),
                _poison(random),
                *[_cancellation(random)] * 3,
                *[_marked(random, makers)] * 6,
            )
        )
    wait_ms = random.choice((0, 0, 0, 0, 1, 10, 30, 120, 500, -20, -300)) if random.random() < 2 * wildness else 0
    return Event(what, wait_ms, gap=random.choice((0, 0, 0, 1, 3)) if random.random() < wildness else 0)


def _whole_group(random: Random) -> tuple[Event, ...]:
    """Every member of a group in a row, each with another reward."""
    first = _arrival(random)
    return tuple(Event(replace(first, member=m, reward=m / 2)) for m in range(first.size))


@lru_cache
def step_table(makers: tuple[str, ...]) -> list[tuple[Event, ...]]:
    """Steps of one or a few events, which may follow each other in any order; simplest first."""
    random = Random(0)
    return [
        _whole_group(random) if random.random() < 0.2 else (_event(random, makers, wildness),)
        for wildness in (0.0, 0.4, 0.5)
        for _ in range(700)
    ]


@lru_cache
def config_table(makers: tuple[str, ...]) -> list[GroupingConfig]:
    """Configurations to start with, widest first."""
    random = Random(1)
    return [_config(random, makers, 0, tight) for tight in (0, 1, 2, 3, 4) for _ in range(100)]


def logs(makers: tuple[str, ...] = ("fifo", "reservoir", "sft", "pairs"), max_size: int = 60) -> st.SearchStrategy[Log]:
    """Logs, with commits, snapshots and crashes between their records."""
    then: st.SearchStrategy[Then] = st.sampled_from(["", "", "", "commit", "commit", "snapshot", "crash"])
    step = st.tuples(st.sampled_from(step_table(makers)), then)
    return st.builds(
        lambda config, steps, version: Log.of(config, steps, version),
        st.sampled_from(config_table(makers)),
        # Left to itself, lists makes five steps on average.
        st.integers(0, max_size).flatmap(lambda size: st.lists(step, min_size=size, max_size=size)),
        st.sampled_from([0, 0, 1, -1]),
    )
