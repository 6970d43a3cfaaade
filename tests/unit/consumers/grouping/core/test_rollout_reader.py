"""Two readers of a rollout agree: what the fast one accepts, decoder and validation accept with the same content."""

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core.drop_rules import Content, value_rejection
from rollstream.consumers.grouping.core.effects import InputRecord
from rollstream.consumers.grouping.core.held_rollouts import SPARE_BYTES, HeldRollout
from rollstream.consumers.grouping.core.rollout_reader import read_again, read_rollouts
from rollstream.consumers.grouping.testing import example_rollout
from rollstream.topics.errors import RecordError
from rollstream.topics.records import (
    GroupCancelled,
    InferenceMetadata,
    Mark,
    NamedArray,
    Rollout,
    RolloutMetadata,
    SamplingParams,
    Turn,
)
from rollstream.topics.wire.codec import HEADER_SIZE, decode, encode, framed_for_registry, signed_frame
from rollstream.topics.wire.keys import encode_key
from rollstream.topics.wire.rl_examples import REFERENCE, WEIGHT_VERSION
from rollstream.topics.wire.validation import problems

RECORDS = 50 * settings().max_examples
STRICT = GroupingConfig(vocabulary_size=40, max_tokens=30, min_reward=-5.0, max_reward=5.0, max_temperature=1.5)
LEAST_BELOW = np.nextafter(np.float32(-9999), np.float32(0))


def sound(random: Random) -> Rollout:
    """A valid rollout with some of the fields that few carry."""
    length = random.choice((1, 2, 7, 33, 70))
    mask = np.array([random.random() < 0.6 for _ in range(length)])
    logprobs = np.where(mask, -np.array([random.expovariate(1) for _ in range(length)]), 0.0).astype("<f4")
    named = {
        REFERENCE: NamedArray.of(-np.ones(length, random.choice(("<f4", "<f8", "<f2")))),
        WEIGHT_VERSION: NamedArray.of(np.arange(length)),
        "wide": NamedArray.of(np.zeros((length, 3), "<u2")),
        "stored": NamedArray(dtype="|u1", shape=(length, 3), stored=f"20261130/{'ab' * 32}"),
    }
    turn = Turn(
        role="user",
        text=random.choice(("", "and then?", "é" * 80)),
        stop=random.randint(0, length),
        inference=InferenceMetadata(sampling_params={"n": "1"} if random.random() < 0.5 else {}),
    )
    return example_rollout(
        random.choice(("u", "worker-3/17", "ü" * 512, "x" * 70)),
        random.choice((0.0, -0.0, 1.0, 6.5, -7.0, 1e30)),
        group_id=random.choice(("", "", "g")),
        environment=random.choice(("env", "other", "e" * 512)),
        episode_uid="episode",
        branches=random.choice((1, 1, 3)),
        branch=0,
        group_size=random.choice((1, 8, 2**31 - 1)),
        policy_version=random.choice((0, 5, 2**60)),
        lowest_version=random.choice((0, 3)),
        highest_version=random.choice((3, 70, 2**40)),
        tokens=np.array([random.choice((0, 7, 39, 40, 2**31 - 1)) for _ in range(length)], "<i4"),
        loss_mask=mask,
        logprobs=logprobs,
        logprobs_mode=random.choice(("raw", "processed")),
        sampling=SamplingParams(
            temperature=random.choice((0.0, -0.0, 1.0, 2.5)),
            top_p=random.choice((1.0, 1.0, 0.9)),
            top_k=random.choice((0, 0, 50, -1)),
            min_p=random.choice((0.0, 0.0, 0.1)),
        ),
        turns=(turn,) * random.choice((0, 0, 1, 3, 70)),
        token_rewards=np.zeros(random.choice((0, length)), "<f4"),
        reward_components={"exact": 1.0, "é": -2.0} if random.random() < 0.5 else {},
        truncated=random.random() < 0.5,
        metadata=RolloutMetadata(
            worker_id=random.choice(("", "w")),
            timestamp=random.choice((0.0, 1.7e9)),
            weight_step=random.choice((-1, 9)),
        ),
        token_arrays={name: named[name] for name in named if random.random() < 0.2},
        extra={"note": "x", "": "é"} if random.random() < 0.3 else {},
    )


def altered(rollout: Rollout, random: Random) -> Rollout:
    """The rollout with another value in one field, which may be at a limit or beyond it."""
    length = len(rollout.tokens)

    def with_one(array: Any, *values: Any) -> Any:
        array = array.copy()
        array[random.randrange(length)] = random.choice(values)
        return array

    changes: list[dict[str, Any]] = [
        {"uid": random.choice(("", "u" * 513, "ü" * 513))},
        {"group_id": random.choice(("g" * 512, "g" * 513))},
        {"episode_uid": random.choice(("", "e" * 512, "e" * 513))},
        {"environment": ""},
        {"example_id": "x" * 513},
        {"group_size": random.choice((0, -1, 2**31 - 1))},
        {"policy_version": -1},
        {"lowest_version": random.choice((-1, 4, 71))},
        {"highest_version": random.choice((-1, 2, 2**62 - 1))},
        {"branch": random.choice((-1, 1, 3))},
        {"branches": random.choice((0, 2, 2**31 - 1))},
        {"branches": 2, "episode_uid": ""},
        {"tokens": with_one(rollout.tokens, -1, -(2**31), 2**31 - 1)},
        {"tokens": rollout.tokens[: random.randrange(length)]},
        {"loss_mask": with_one(rollout.loss_mask, True, False)},
        {"loss_mask": rollout.loss_mask[: random.randrange(length)]},
        {"logprobs": with_one(rollout.logprobs, -0.0, 0.0, -1.0, 1e-3, 9.9e-4, 1e-4, 1.0, np.nan, -np.nan)},
        {"logprobs": with_one(rollout.logprobs, np.inf, -np.inf, -9999.0, LEAST_BELOW, -9998.0, -3e38, 1e-40)},
        {"logprobs": np.append(rollout.logprobs, np.float32(0))},
        {"reward": random.choice((np.nan, np.inf, -np.inf, 1e30, 1.1e30, -1.1e30, 5e-324))},
        {"reward_components": {"x": random.choice((np.nan, np.inf, 1e308))}},
        {"sampling": SamplingParams(temperature=random.choice((-1.0, np.nan, np.inf, 1e300)))},
        {"sampling": SamplingParams(top_p=random.choice((-0.1, 1.1, np.nan, 0.0)))},
        {"sampling": SamplingParams(min_p=random.choice((-0.1, 1.1, np.nan, 1.0)))},
        {
            "turns": (
                Turn(role="", text="", start=random.choice((-1, 0, 1, length)), stop=random.choice((0, length + 1))),
            )
        },
        {"token_rewards": with_one(np.zeros(length, "<f4"), np.nan, np.inf, 3e38)},
        {"token_rewards": np.zeros(length + 1, "<f4")},
        {"token_arrays": {"": NamedArray.of(np.zeros(length))}},
        {"token_arrays": {REFERENCE: NamedArray.of(with_one(np.zeros(length), np.nan, np.inf, 1e39, 1.0))}},
        {"token_arrays": {"x": NamedArray(dtype="|u1", shape=(length, 3), stored=random.choice(("x", "20261130/ab")))}},
        {"token_arrays": {"x": NamedArray(dtype=random.choice(("<f4", "<f16", ">f4")), shape=(length, 0), data=b"")}},
    ]
    return replace(rollout, **random.choice(changes))


def damaged(value: bytes, random: Random) -> bytes:
    """The value with some bytes replaced, removed, inserted, or written in another form of the same number."""
    changed = bytearray(value)
    for _ in range(random.choice((1, 1, 2))):
        at = random.randrange(len(changed))
        match random.randrange(5):
            case 0:
                changed[at] = random.choice((0, 1, 2, 0x7F, 0x80, 0xFF, random.randrange(256)))
            case 1:
                del changed[at : at + random.choice((1, 2, 4, 8))]
            case 2:
                changed[at:at] = random.randbytes(random.choice((1, 4, 8)))
            case 3 if changed[at] < 128:
                changed[at : at + 1] = bytes((changed[at] | 128, *(128,) * random.choice((0, 1, 8, 9)), 0))
            case _:
                changed += random.choice((b"\0", bytes(66), b"\xc3\x53" + bytes(64)))
    return bytes(changed)


def drawn(random: Random) -> bytes:
    """The value of a record: of a sound rollout, or of one altered or damaged."""
    rollout = sound(random)
    if random.random() < 0.5:
        rollout = altered(rollout, random)
    value = encode(rollout)
    if random.random() < 0.2:
        value = signed_frame(value, bytes(64))
    if random.random() < 0.2:
        value = framed_for_registry(value, 7)
    return damaged(value, random) if random.random() < 0.5 else value


def by_reference(value: bytes | None) -> tuple[HeldRollout, list[str]] | None:
    """The rollout and everything wrong with it, by decoder and validation; None for other records."""
    try:
        rollout = decode(value)
    except RecordError:
        return None
    return (HeldRollout.of(rollout), problems(rollout)) if isinstance(rollout, Rollout) else None


def content(held: HeldRollout) -> str:
    """Everything that the fold may see of a rollout, bit for bit (-0.0 and NaN included)."""
    arrays = [(a.dtype.str, a.tobytes()) for a in (held.tokens, held.loss_mask, held.logprobs)]
    fields = held._asdict()
    for place in ("data", "begins", "token_bound"):
        del fields[place]
    return repr((fields, held.filtered, held.sampling, arrays))


def verdict(value: bytes, held: HeldRollout, faults: list[str]) -> object:
    record = InputRecord(0, 0, encode_key(held.environment, held.example_id), value)
    return value_rejection(record, Content(held, faults), 0, 1, STRICT, replaying=False)


def test_what_the_reader_accepts_decoder_and_validation_accept_alike() -> None:
    random, accepted, valid = Random(11), 0, 0
    while valid < RECORDS // 3:
        values = [drawn(random) for _ in range(random.choice((1, 2, 9)))]
        for value, held in zip(values, read_rollouts(values), strict=True):
            expected = by_reference(value)
            valid += expected is not None and not expected[1]
            if (again := read_again(value)) is not None:
                assert expected is not None, value.hex()
                assert content(again) == content(expected[0]), value.hex()
            if held is None:
                continue
            assert again is not None
            accepted += 1
            assert expected is not None, value.hex()
            assert expected[1] == [], value.hex()
            assert content(held) == content(expected[0]), value.hex()
            assert held.token_bound >= held.tokens.max()
            assert verdict(value, held, []) == verdict(value, *expected), value.hex()
            assert content(held.trimmed({"wide"})) == content(expected[0].trimmed({"wide"}))
    # Only other forms of the same content are left to the decoder, such as a size before a block or a number with more
    # bytes than it needs.
    print(f"{accepted} of {valid} valid records were accepted")
    assert accepted > 0.9 * valid


def test_a_bad_record_does_not_keep_others_from_being_read() -> None:
    random = Random(12)
    good = [encode(sound(random)) for _ in range(30)]
    bad = encode(example_rollout("bad", tokens=np.array([-1, 1, 1, 1], "<i4")))
    values = [None, b"", *good[:9], bad, *good[9:], encode(Mark(kind="drain")), encode(cancelled())]
    accepted = [held is not None for held in read_rollouts(values)]
    assert accepted == [False, False, *[True] * 9, False, *[True] * 21, False, False]


def cancelled() -> GroupCancelled:
    return GroupCancelled(environment="env", example_id="0", policy_version=0, group_size=2, uids=("a",))


@pytest.mark.parametrize("again", [b"\x8a\x00", b"\x8a\x80\x80\x00"])
def test_a_number_with_more_bytes_than_it_needs_is_read(again: bytes) -> None:
    value = encode(example_rollout("12345"))
    assert value[HEADER_SIZE : HEADER_SIZE + 1] == b"\x0a"
    [held] = read_rollouts([value[:HEADER_SIZE] + again + value[HEADER_SIZE + 1 :]])
    assert held is not None
    assert held.uid == "12345"


def test_a_number_of_more_than_64_bits_is_left_to_the_decoder() -> None:
    value = encode(example_rollout("a"))
    assert value.endswith(b"\x01\0\0"), "weight_step, token_arrays and extra"
    again = value[:-3] + b"\x81" + b"\x80" * 8 + b"\x02\0\0"
    assert decode(again).metadata.weight_step == -1
    assert read_rollouts([again]) == [None]


@pytest.mark.parametrize("text", ["", "x" * (SPARE_BYTES // 2), "x" * 50_000])
def test_a_held_rollout_keeps_few_bytes_besides_its_arrays(text: str) -> None:
    value = encode(example_rollout("a", tokens=np.arange(500, dtype="<i4"), turns=(Turn(role="user", text=text),)))
    [held] = read_rollouts([value])
    assert held is not None
    kept = held.trimmed()
    assert len(kept.data) <= 9 * 500 + SPARE_BYTES
    assert content(kept) == content(held)
