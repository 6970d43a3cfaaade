"""The fold gives any record a fate, whatever its bytes, and groups the valid ones after it."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.consumers.grouping.config import GENERATION_STEP, ForeignConfiguration, GroupingConfig
from rollstream.consumers.grouping.core import task_state
from rollstream.consumers.grouping.core.configuration_marks import VERSION_STEP
from rollstream.consumers.grouping.core.effects import InputRecord
from rollstream.consumers.grouping.testing import GroupingTestDriver, example_rollout
from rollstream.topics.errors import RecordError
from rollstream.topics.records import GroupCancelled, Mark, NamedArray, Rollout, SamplingParams, TrainingBatch
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from rollstream.topics.wire.rl_examples import REFERENCE
from tests.strategies import any_record

EXAMPLES = settings().max_examples // 2
EXTREME = st.sampled_from(
    [0, 1, -1, 2, 2**31 - 1, 2**31, 2**62, 2**63 - 1, -(2**63), VERSION_STEP, VERSION_STEP + 1, GENERATION_STEP + 1]
)
NUMBER = st.one_of(EXTREME, st.integers(-(2**63), 2**63 - 1))
FLOAT = st.one_of(st.floats(), st.sampled_from([0.0, -0.0, 1e-40, 1e-320, 1e300, 1e6]))

DTYPE = st.sampled_from(
    ["<f4", "<f2", "<f8", "<f16", "<c8", "<i8", "|b1", "|u1", "<U", "<U4", "|O", "|V4", "bfloat16", "x"]
)
SHAPE = st.one_of(
    st.lists(st.sampled_from([0, 1, 2, 4, -1, 2**31, 2**62]), max_size=4),
    st.integers(0, 80).map(lambda rank: [4, *[1] * rank]),
    st.just([4, *[2**62] * 1000]),
)
NAMED = st.builds(
    NamedArray, dtype=DTYPE, shape=SHAPE.map(tuple), data=st.sampled_from([b"", bytes(4), bytes(16), b"\xff" * 16])
)
ARRAYS = st.dictionaries(st.sampled_from(["", "x", REFERENCE, "n" * 600]), NAMED, max_size=2)
INTS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4).map(lambda ids: np.array(ids, "<i4"))
ODD_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "token_arrays": ARRAYS,
    "sampling": st.builds(SamplingParams, temperature=FLOAT, top_p=FLOAT, top_k=NUMBER.map(lambda n: n % 2**31)),
    "reward": FLOAT,
    "policy_version": NUMBER,
    "lowest_version": NUMBER,
    "highest_version": NUMBER,
    "group_size": st.sampled_from([0, 1, 2, -1, 2**31 - 1]),
    "branch": st.sampled_from([0, 1, -1, 2**31 - 1]),
    "branches": st.sampled_from([0, 1, 2, 2**31 - 1]),
    "episode_uid": st.sampled_from(["", "e", "e" * 600]),
    "uid": st.sampled_from(["", "a", "\x00", "u" * 600]),
    "example_id": st.sampled_from(["0", "", "\x00", '"', "x" * 600]),
    "tokens": INTS,
    "token_rewards": st.sampled_from([np.zeros(0, "<f4"), np.full(4, np.nan, "<f4"), np.zeros(3, "<f4")]),
    "reward_components": st.dictionaries(st.just("r"), FLOAT),
}
ODD_ROLLOUT = st.lists(st.sampled_from(sorted(ODD_FIELDS)), min_size=1, max_size=3, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: ODD_FIELDS[name] for name in names}).map(
        lambda fields: replace(example_rollout("odd"), **fields)
    )
)
ODD_CANCELLATION = st.builds(
    GroupCancelled,
    environment=st.sampled_from(["env", "", "e" * 600]),
    example_id=st.sampled_from(["0", ""]),
    policy_version=st.sampled_from([0, -1, 2**62]),
    group_size=st.sampled_from([0, 1, 2, 2**31 - 1]),
    uids=st.lists(st.sampled_from(["", "a", "b", "u" * 600]), max_size=3).map(tuple),
)
VALUE = st.one_of(
    st.none(),
    st.booleans(),
    NUMBER,
    FLOAT,
    st.just(10**400),
    st.text(max_size=5),
    st.lists(st.text(max_size=5), max_size=2),
)


@st.composite
def odd_marks(draw: st.DrawFn) -> Mark:
    """Marks of every kind; most configurations are valid except for one or two values."""
    values = json.loads(GroupingConfig(generation=1).to_json())
    for key in draw(st.lists(st.sampled_from([*sorted(values), "a_key"]), max_size=2)):
        values[key] = draw(VALUE)
    generation = draw(st.one_of(st.just(1), NUMBER))
    if draw(st.booleans()):
        values["generation"] = generation
    text = draw(st.one_of(st.just(json.dumps(values)), st.text(max_size=5)))
    return Mark(
        kind=draw(st.sampled_from(["deadline", "policy_version", "drain", "configuration", "configuration"])),
        policy_version=draw(st.one_of(st.just(-1), NUMBER)),
        generation=generation,
        configuration=text,
        wall_time=draw(FLOAT),
    )


@st.composite
def values(draw: st.DrawFn) -> tuple[bytes | None, bytes | None]:
    """Key and value of a record."""
    record = draw(
        st.one_of(
            ODD_ROLLOUT,
            ODD_CANCELLATION,
            odd_marks(),
            *map(any_record, (Rollout, GroupCancelled, Mark, TrainingBatch)),
        )
    )
    try:
        value = bytearray(encode(record))
    except RecordError:  # numbers that no field can hold
        return None, draw(st.one_of(st.none(), st.binary(max_size=40)))
    if draw(st.integers(0, 3)) == 0:
        value[draw(st.integers(10, len(value) - 1))] = draw(st.integers(0, 255))
    own = (
        encode_key("mark", record.kind)
        if isinstance(record, Mark)
        else encode_key(getattr(record, "environment", ""), getattr(record, "example_id", ""))
    )
    return draw(st.sampled_from([own, own, own, None, b"[]"])), bytes(value)


@settings(max_examples=EXAMPLES)
@given(hostile=st.lists(values(), min_size=1, max_size=4), snapshot=st.booleans())
def test_no_record_ends_a_task_and_valid_ones_are_grouped(
    hostile: list[tuple[bytes | None, bytes | None]], snapshot: bool
) -> None:
    driver = GroupingTestDriver(GroupingConfig(batch_rollouts=2, max_policy_lag=-1))
    for key, value in hostile:
        try:
            driver.pipe(InputRecord(driver.end, 0, key, value))
        except ForeignConfiguration:
            return  # A configuration that other code may run stops the task; the error names the remedy.
    driver.commit(snapshot=snapshot)
    config, clock, read = driver.fold.config, driver.fold.policy_version, driver.end
    driver.crash_and_restore()
    assert (driver.fold.config, driver.fold.policy_version) == (config, clock)
    assert (
        sum(count.rollouts for count in task_state.restored_state(driver.journal).counts) + driver.fold.in_flight
        == read
    )
    driver.configure(GroupingConfig(batch_rollouts=2, max_policy_lag=-1, exclude_environments=()))
    version = max(clock, 0)
    for uid, reward in (("honest-a", 1.0), ("honest-b", 0.0)):
        driver.pipe(example_rollout(uid, reward, environment="honest", policy_version=version))
    driver.drain()
    assert {"honest-a", "honest-b"} <= {uid for batch in driver.batches for uid in batch.uids}
