"""Recorded work of earlier core versions: one partition's log, journal, batches and drops, as their own code made them.

`python -m tests.support.upgrade` writes the fixture of the core version it runs with, once, before that version is
left behind; tests/fixtures/core-1.json was written by the last code of core version 1, core-2.json by the last of
version 2, with more in it (`_extremes`), and so on. Such a file is never written again.
"""

import base64
import json
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core.effects import CORE_VERSION, InputRecord
from rollstream.consumers.grouping.core.rates import BURST_S
from rollstream.consumers.grouping.testing import GroupingTestDriver, example_rollout
from rollstream.topics import codec
from rollstream.topics.keys import encode_key
from rollstream.topics.records import (
    Drop,
    GroupCancelled,
    JournalRecord,
    Mark,
    NamedArray,
    Rollout,
    SamplingParams,
    TrainingBatch,
)
from rollstream.topics.rl_examples import REFERENCE
from tests.support.paths import ROOT

FIXTURES = ROOT / "tests" / "fixtures"
BEGAN_MS = 1_760_000_000_000
FOREVER_S = 1e9
"""Deadlines so late that a broker's clock of today fires none of them."""


@dataclass(frozen=True)
class Recorded:
    """Log that a core version left behind: everything before `position` is committed, the rest is not read."""

    core_version: int
    partition: int
    partitions: int
    topic_id: str
    """Topic id that the journal names; a broker gives another."""
    position: int
    log: list[InputRecord]
    """The partition, offsets without gaps from 0; timestamps are append times."""
    journal: list[bytes]
    """Journal records up to `position`, encoded under the schema of then, generation 0 first."""
    batches: list[TrainingBatch]
    """Every batch of the whole log, as that core version cut them."""
    drops: list[Drop]
    """Every drop of the whole log."""
    dead_letters: list[int]
    """Offsets of records that mean nothing."""

    def journal_records(self) -> list[JournalRecord]:
        """The journal as today's code reads it."""
        return [codec.decode_as(JournalRecord, value) for value in self.journal]

    def committed(self) -> list[TrainingBatch]:
        """Batches that are committed at `position`."""
        committed = {batch_id for record in self.journal_records() for batch_id in record.batch_ids}
        return [batch for batch in self.batches if batch.batch_id in committed]


def load(core_version: int) -> Recorded:
    """The fixture of a core version."""
    values = json.loads((FIXTURES / f"core-{core_version}.json").read_text(encoding="utf-8"))
    return Recorded(
        core_version=values["core_version"],
        partition=values["partition"],
        partitions=values["partitions"],
        topic_id=values["topic_id"],
        position=values["position"],
        log=[InputRecord(offset, ms, _bytes(key), _bytes(value)) for offset, ms, key, value in values["log"]],
        journal=[base64.b64decode(value) for value in values["journal"]],
        batches=[codec.decode_as(TrainingBatch, base64.b64decode(value)) for value in values["batches"]],
        drops=[Drop(**drop) for drop in values["drops"]],
        dead_letters=values["dead_letters"],
    )


# ---------------------------------------------------------------------- recording


class _Recorder:
    """A driver whose log has times like a broker's."""

    def __init__(self, config: GroupingConfig) -> None:
        self.driver = GroupingTestDriver(config, policy_version=-1, now_ms=BEGAN_MS)

    def add(self, record: Rollout | GroupCancelled | Mark | bytes, wait_ms: int = 7) -> None:
        self.driver.pipe(record, at_ms=self.driver.now_ms + wait_ms)

    def rollout(self, uid: str, reward: float, example_id: str, **fields: Any) -> None:
        self.add(example_rollout(uid, reward, example_id=example_id, **fields))

    def pair(self, example_id: str, rewards: tuple[float, float] = (1.0, 0.0), **fields: Any) -> None:
        for uid, reward in zip("ab", rewards, strict=True):
            self.rollout(f"{example_id}-{uid}", reward, example_id, **fields)

    def branch(self, episode: str, branch: int, reward: float, example_id: str, **fields: Any) -> None:
        uid = f"{example_id}-{episode}{branch}"
        self.rollout(uid, reward, example_id, episode_uid=episode, branch=branch, branches=2, **fields)

    def cancel(self, *uids: str, example_id: str, size: int, version: int) -> None:
        self.add(
            GroupCancelled(environment="env", example_id=example_id, policy_version=version, group_size=size, uids=uids)
        )


def _before(recorder: _Recorder, wide: GroupingConfig) -> None:
    """Add everything that a fold may meet; at the end it holds open groups, sealed groups and groups with branches."""
    r, driver = recorder, recorder.driver
    r.add(Mark(kind="policy_version", policy_version=0))
    r.pair("first")
    r.rollout("second-a", 1.0, "second")
    r.rollout("second-a", 0.5, "second")  # duplicate_uid
    r.rollout("second-b", 0.25, "second")
    driver.commit()
    r.add(b"not a record")
    r.rollout("bad", float("nan"), "bad")  # invalid
    for episode, branch, reward in (("e", 0, 1.0), ("f", 0, 0.0), ("e", 1, 0.5), ("f", 1, 0.25)):
        r.branch(episode, branch, reward, "branched-before")
    r.pair("equal", (1.0, 1.0))  # zero_variance
    r.rollout("short-a", 1.0, "short")
    driver.commit(snapshot=True)
    r.rollout("ahead-a", 1.0, "ahead", group_size=3, policy_version=3)
    r.cancel("ahead-c", example_id="ahead", size=3, version=3)
    r.rollout("ahead-b", 0.0, "ahead", group_size=3, policy_version=3)  # sealed, waits for version 3
    r.add(Mark(kind="deadline"), 61_000)  # group_too_small
    r.add(Mark(kind="configuration", generation=1, configuration=wide.to_json()))
    r.add(Mark(kind="policy_version", policy_version=1), -3_000)
    for example_id in ("third", "fourth", "fifth"):
        r.pair(example_id, (0.75, 0.5), policy_version=1)
    driver.commit(snapshot=True)
    r.pair("sealed", (0.0, 1.0), policy_version=1)
    r.pair("sealed-old", (0.0, 1.0))
    r.rollout("open-a", 1.0, "open", policy_version=1)
    driver.commit()
    r.branch("e", 0, 1.0, "branched-across", policy_version=1)
    r.branch("f", 0, 0.0, "branched-across", policy_version=1)
    r.branch("e", 1, 0.0, "branched-across", policy_version=1)
    r.rollout("shrunk-a", 1.0, "shrunk", group_size=4, policy_version=1)
    r.rollout("shrunk-b", 0.5, "shrunk", group_size=4, policy_version=1)
    r.cancel("shrunk-a", "shrunk-d", example_id="shrunk", size=4, version=1)
    r.rollout("first-c", 1.0, "first")  # late
    driver.commit()


def _extremes(recorder: _Recorder) -> None:
    """Records that core version 2 accepted, sensible or not."""
    r, driver = recorder, recorder.driver
    deep = NamedArray(dtype="<f4", shape=(4, *(1,) * 69), data=bytes(16))
    hollow = NamedArray(dtype="<f4", shape=(4, 2**62, 0), data=b"")
    r.pair("deep", policy_version=1, token_arrays={"deep": deep, "hollow": hollow})
    reference = NamedArray.of(np.array([0.0, 0.0, -1.0, -2.0], "<f4"))
    r.pair("referred", policy_version=1, token_arrays={REFERENCE: reference})
    cold = SamplingParams(temperature=1e-40)
    r.rollout("absurd-a", 1e6, "absurd", policy_version=1, sampling=cold, tokens=np.full(4, 2**31 - 1, "<i4"))
    r.rollout("wide-a", 1e29, "wide", policy_version=1)
    r.add(Mark(kind="configuration", generation=7, configuration="none"))
    r.add(Mark(kind="configuration", generation=7, configuration=driver.fold.config.to_json()))
    driver.commit()


def _beyond(recorder: _Recorder, last: GroupingConfig) -> None:
    """Marks and cancellations without bounds, groups taken apart, a partition that is full."""
    r = recorder
    r.rollout("absurd-b", -1e6, "absurd", policy_version=3)
    r.rollout("absurd-c", 1.0, "absurd", policy_version=1)
    r.rollout("wide-b", 1.0, "wide", policy_version=1)
    rated = [
        example_rollout(uid, reward, environment="rated", policy_version=3)
        for uid, reward in (("first-of-a-metered-pair", 1.0), ("other-of-a-metered-pair", 0.0))
    ]
    values = [codec.encode(rollout) for rollout in rated]
    plain = sum(map(len, values))
    rate = -(-plain // BURST_S)
    assert plain <= BURST_S * rate < plain + 2 * codec.REGISTRY_PREFIX_SIZE, "the prefixes decide"
    last = replace(last, quotas=(f"rated:bytes_per_s={rate}",))
    r.add(Mark(kind="configuration", generation=last.generation, configuration=last.to_json()))
    for rollout, value in zip(rated, values, strict=True):  # quota, by the bytes of the prefix under core version 7
        key = encode_key(rollout.environment, rollout.example_id)
        prefixed = codec.framed_for_registry(value, 1)
        r.driver.pipe(InputRecord(r.driver.end, r.driver.now_ms, key, prefixed))
    for example_id in ("taken", "apart", "singly"):
        r.pair(example_id, (0.75, 0.5), policy_version=3)
    r.cancel(*(f"gone-{number}" for number in range(5000)), example_id="gone", size=5001, version=3)
    for number in range(4):  # capacity
        r.rollout(f"full-{number}", 1.0, f"full-{number}", policy_version=3, tokens=np.arange(700, dtype="<i4"))
    r.add(Mark(kind="policy_version", policy_version=2**40))
    r.pair("far", policy_version=2**40)
    r.add(Mark(kind="drain"))


def _after(recorder: _Recorder) -> None:
    """Records that complete what is open."""
    r = recorder
    r.rollout("open-b", 0.0, "open", policy_version=1)
    r.rollout("shrunk-d", 0.0, "shrunk", group_size=4, policy_version=1)  # cancelled
    r.branch("f", 1, 0.5, "branched-across", policy_version=1)
    r.rollout("shrunk-c", 0.0, "shrunk", group_size=4, policy_version=1)
    r.rollout("sealed-c", 0.0, "sealed", policy_version=1)  # late
    r.pair("old", (0.0, 1.0))
    r.add(Mark(kind="policy_version", policy_version=3), 500)  # stale_version; releases "ahead"
    for episode, branch, reward in (("g", 0, 1.0), ("h", 1, 0.0), ("h", 0, 1.0), ("g", 1, 1.0)):
        r.branch(episode, branch, reward, "branched-after", policy_version=3)
    r.pair("last", (0.5, 0.0), policy_version=3)
    r.rollout("never-a", 0.0, "never", policy_version=3)
    r.add(Mark(kind="drain"))


def _since(recorder: _Recorder, last: GroupingConfig) -> None:
    """Newer versions that are never trained on, a clock that jumps, a record of another topic, groups released by a
    drain."""
    r = recorder
    names = [f"jump-{number}" for number in range(3)]
    rated = [example_rollout(n, 1.0, environment="rated", example_id=n, policy_version=3) for n in names]
    rate = -(-2 * len(codec.encode(rated[0])) // BURST_S)
    last = replace(last, quotas=(f"rated:bytes_per_s={rate}",))
    r.add(Mark(kind="configuration", generation=last.generation, configuration=last.to_json()))
    r.pair("newest", policy_version=3)
    r.pair("newest", policy_version=2**50)  # waits for a version that never comes
    r.pair("informative", policy_version=2)
    r.pair("informative", (1.0, 1.0), policy_version=3)  # zero_variance
    r.add(codec.encode(r.driver.journal[0])[:-1])
    r.add(rated[0], 3_600_000)
    r.add(rated[1], -3_600_000)
    r.add(rated[2], BURST_S * 1000)  # quota, because stream time stands still under core version 8
    for example_id in ("one", "two", "three"):
        r.pair(example_id, policy_version=4)
    r.add(Mark(kind="drain", policy_version=4))


def record() -> None:
    """Write the fixture of the core version this runs with. Raises FileExistsError where there is one."""
    narrow = {"group_deadline_s": 60.0, "batch_rollouts": 4}
    shared: dict[str, Any] = {
        "max_batch_age_s": FOREVER_S,
        "future_deadline_s": FOREVER_S,
        "horizon_s": FOREVER_S,
        "max_policy_lag": 2,
    }
    wide = {"group_deadline_s": FOREVER_S, "batch_rollouts": 6, "estimator": "rloo_normalized", "generation": 1}
    recorder = _Recorder(GroupingConfig(**shared, **narrow))
    _before(recorder, GroupingConfig(**shared, **wide))
    _extremes(recorder)
    driver = recorder.driver
    journal = [codec.encode(entry) for entry in driver.journal]
    position = driver.fold.position
    _after(recorder)
    last = {"generation": 2, "maker": "reservoir", "estimator": "opo", "batch_rollouts": 3, "capacity_bytes": 8192}
    _beyond(recorder, GroupingConfig(**{**shared, **wide, **last}))
    _since(recorder, GroupingConfig(**{**shared, **wide, **last, "generation": 3, "capacity_bytes": 2**20}))
    values = {
        "core_version": CORE_VERSION,
        "partition": driver.fold.partition,
        "partitions": driver.fold.partitions,
        "topic_id": driver.journal[0].topic_id,
        "position": position,
        "log": [(r.offset, r.timestamp_ms, _text(r.key), _text(r.value)) for r in driver.log],
        "journal": [_text(value) for value in journal],
        "batches": [_text(codec.encode(batch)) for batch in driver.batches],
        "drops": [vars(drop) for drop in driver.drops],
        "dead_letters": [letter.record.offset for letter in driver.dead_letters],
    }
    lines = [f" {json.dumps(name)}: {_listed(value)}" for name, value in values.items()]
    with (FIXTURES / f"core-{CORE_VERSION}.json").open("x", encoding="utf-8") as file:
        file.write("{\n" + ",\n".join(lines) + "\n}\n")


def _listed(value: object) -> str:
    if not isinstance(value, list):
        return json.dumps(value)
    return "[\n" + ",\n".join(f"  {json.dumps(item)}" for item in value) + "\n ]"


def _text(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode()


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)


if __name__ == "__main__":
    record()
