"""A seeded flood of hostile records for `rollouts`: damaged encodings of sound records, sound records with senseless
fields, records of other kinds, forged marks and bytes of no kind, with honest groups among them.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from rollstream.topics.records import GroupCancelled, LearnerStep, Mark, NamedArray, Rollout, SamplingParams
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from tests.support.hostile import RECORDS, ROLLOUTS
from tests.support.hostile_input import FLOATS, NUMBERS, TEXTS, HostileInput
from tests.support.runs import rollout

GROUP_SIZE = 4
_EVERY = 50
"""One record of so many is honest."""


class FloodRecord(NamedTuple):
    """A record of the flood."""

    key: bytes | None
    value: bytes | None
    honest: bool


class Flood:
    """So many records of one seed, and the rest of the last honest group; the same seed gives the same records."""

    def __init__(self, seed: int, records: int) -> None:
        self._input = HostileInput(seed)
        self._random = self._input.random
        self._records = records
        self.honest: list[str] = []
        """Uids of the honest rollouts written so far; all groups are whole at the end."""
        self._sound = [encode(rollout(f"seed{n}", n % GROUP_SIZE, turns=())) for n in range(8)]
        self._foreign = [encode(record) for records in RECORDS.values() for record in records]
        self._odd = [encode(record) for record in ROLLOUTS if not isinstance(record, Mark)]
        step = LearnerStep(
            learner="l", step=1, input_run="r", uses=(), position=0, policy_version=0, params_digest="",
            trained_total=0, skipped_total=0,
        )  # fmt: skip
        self._foreign.append(encode(step))

    def __iter__(self) -> Iterator[FloodRecord]:
        for number in range(self._records):
            if number % _EVERY == 0:
                yield self._honest()
            else:
                yield self._hostile()
        while len(self.honest) % GROUP_SIZE:
            yield self._honest()

    def _honest(self) -> FloodRecord:
        group, member = divmod(len(self.honest), GROUP_SIZE)
        sound = rollout(f"honest{group}", member, environment="honest")
        self.honest.append(sound.uid)
        return FloodRecord(encode_key(sound.environment, sound.example_id), encode(sound), True)

    def _hostile(self) -> FloodRecord:
        if self._random.random() < 0.3:
            # It keeps its key: some damage leaves a sound rollout, repeated or of a group that is never whole.
            number = self._random.randrange(len(self._sound))
            return FloodRecord(encode_key("env", f"seed{number}"), self._input.damaged(self._sound[number]), False)
        return FloodRecord(self._key(), self._value(), False)

    def _key(self) -> bytes | None:
        return self._random.choice((None, b"", b"\xff", b'["env","x"]', b"[" * 100, self._random.randbytes(9)))

    def _value(self) -> bytes | None:
        kind = self._random.random()
        if kind < 0.45:
            return self._input.damaged(self._random.choice(self._sound))
        if kind < 0.60:
            return encode(self._senseless())
        if kind < 0.70:
            return encode(self._cancelled())
        if kind < 0.80:
            return encode(self._mark())
        if kind < 0.88:
            return self._input.damaged(self._random.choice(self._odd))
        if kind < 0.93:
            return self._random.choice(self._foreign)
        if kind < 0.99:
            return self._input.junk()
        return None

    def _senseless(self) -> Rollout:
        choose = self._random.choice
        changes = {
            "uid": choose((*TEXTS, f"u{self._random.randrange(1000)}")),
            "reward": choose(FLOATS),
            "environment": choose((*TEXTS, f"env{self._random.randrange(1000)}")),
            "example_id": choose(TEXTS),
            "group_id": choose(("", "g", f"g{self._random.randrange(100)}", "x" * 600)),
            "group_size": choose((0, 1, 2, 3, -1, 2**31 - 1)),
            "policy_version": choose(NUMBERS),
            "lowest_version": choose(NUMBERS),
            "highest_version": choose(NUMBERS),
            "branch": choose((0, 1, -1, 2**31 - 1)),
            "branches": choose((0, 1, 2, 2**31 - 1)),
            "episode_uid": choose(TEXTS),
            "tokens": np.full(self._random.randrange(9), -1, "<i4"),
            "loss_mask": np.ones(self._random.randrange(9), bool),
            "logprobs": self._floats(),
            "token_rewards": self._floats(),
            "reward_components": {choose(TEXTS): choose(FLOATS)},
            "token_arrays": {choose(TEXTS): NamedArray(dtype=choose(("<f4", "O", "<U9")), shape=(2**31,), data=b"x")},
            "sampling": SamplingParams(temperature=choose(FLOATS), top_p=choose(FLOATS)),
        }
        names = self._random.sample(sorted(changes), self._random.randint(1, 3))
        return replace(rollout("hostile"), **{name: changes[name] for name in names})  # type: ignore[arg-type]

    def _floats(self) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        # A float32 overflows to infinity here, as a producer's would.
        with np.errstate(over="ignore"):
            return np.full(self._random.randrange(9), self._random.choice(FLOATS)).astype("<f4")

    def _cancelled(self) -> GroupCancelled:
        choose = self._random.choice
        return GroupCancelled(
            environment=choose((*TEXTS, "honest")),
            example_id=choose(TEXTS),
            policy_version=choose(NUMBERS),
            group_size=choose((0, 1, 4, -1, 2**31 - 1)),
            uids=tuple(choose(TEXTS) for _ in range(self._random.randrange(4))),
        )

    def _mark(self) -> Mark:
        choose = self._random.choice
        return Mark(
            kind=choose(("policy_version", "deadline", "configuration", "drain")),
            policy_version=choose(NUMBERS),
            generation=choose(NUMBERS),
            configuration=choose(
                ("", "{", "[]", "null", '{"core_version": 99}', '{"exclude_environments": ["honest"]}')
            ),
            wall_time=choose(FLOATS),
        )
