"""Records survive the wire bit for bit, and no bytes whatsoever make decoding raise anything but RecordError."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollstream.consumers.grouping.testing import example_rollout
from rollstream.topics.errors import RecordError
from rollstream.topics.records import Mark, NamedArray, Rollout, same
from rollstream.topics.wire.codec import (
    HEADER_SIZE,
    MAGIC,
    RECORD_TYPES,
    REGISTRY_MAGIC,
    decode,
    decode_as,
    encode,
    frame_of,
    framed_for_registry,
    is_frame,
    kind_of,
    schema_of,
    schemas,
)
from tests.strategies import any_record, rollouts

EXAMPLES = settings().max_examples // 6
NAMES = [cls.__name__ for cls in RECORD_TYPES]


@given(rollout=rollouts())
def test_a_sound_rollout_is_read_back_as_written(rollout: Rollout) -> None:
    assert same(decode_as(Rollout, encode(rollout)), rollout)


def same_bits(a: Any, b: Any) -> bool:
    """`same`, but for NaNs among plain floats, which compare by their bytes here."""
    return encode(a) == encode(b) and type(a) is type(b)


@pytest.mark.parametrize("cls", RECORD_TYPES, ids=NAMES)
@settings(max_examples=EXAMPLES)
@given(data=st.data(), schema_id=st.integers(0, 2**32 - 1))
def test_a_record_of_any_values_is_read_back_as_written_with_or_without_an_id_of_a_registry(
    cls: type, data: st.DataObject, schema_id: int
) -> None:
    record = data.draw(any_record(cls))
    value = encode(record)
    assert same_bits(decode(value), record)
    framed = framed_for_registry(value, schema_id)
    assert framed[0] == 0
    assert int.from_bytes(framed[1:5], "big") == schema_id
    assert same_bits(decode(framed), record)
    assert frame_of(framed) == frame_of(value) == value
    assert schema_of(framed) is schema_of(value) is schemas()[cls.__name__][-1]
    assert framed_for_registry(framed, 7) == framed_for_registry(value, 7)


@pytest.mark.parametrize("cls", RECORD_TYPES, ids=NAMES)
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_mutated_bytes_decode_to_a_record_or_raise_record_error(cls: type, data: st.DataObject) -> None:
    value = bytearray(encode(data.draw(any_record(cls))))
    if data.draw(st.booleans()):
        value = bytearray(framed_for_registry(bytes(value), 5))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(value)))
        match data.draw(st.integers(0, 2)):
            case 0:
                value[at : at + 1] = data.draw(st.binary(min_size=1, max_size=1))
            case 1:
                del value[at : at + data.draw(st.integers(1, 9))]
            case _:
                value[at:at] = data.draw(st.binary(min_size=1, max_size=11))
    assert len(refusal(bytes(value))) < 500


@pytest.mark.parametrize("cls", RECORD_TYPES, ids=NAMES)
@settings(max_examples=EXAMPLES)
@given(tail=st.binary(max_size=200))
@example(tail=b"\xff" * 100)
@example(tail=b"\x80" * 100)
@example(tail=b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01" * 10)
def test_arbitrary_bytes_under_a_known_fingerprint_decode_or_raise_record_error(cls: type, tail: bytes) -> None:
    assert len(refusal(MAGIC + schemas()[cls.__name__][-1].fingerprint + tail)) < 500


_STARTS = st.sampled_from((b"", REGISTRY_MAGIC, REGISTRY_MAGIC + bytes(4) + MAGIC, MAGIC))


@given(start=_STARTS, value=st.one_of(st.none(), st.binary(max_size=30)))
def test_arbitrary_bytes_raise_record_error(start: bytes, value: bytes | None) -> None:
    read = None if value is None else start + value
    with pytest.raises(
        RecordError, match=r"not an Avro single-object frame|unknown schema fingerprint|like a record of a registry"
    ):
        decode(read)
    assert kind_of(read) is None


def test_a_record_of_a_foreign_schema_of_a_registry_names_the_schema_and_the_remedy() -> None:
    with pytest.raises(RecordError, match=r"schema 77\).*`rollstream topics apply`"):
        decode(REGISTRY_MAGIC + (77).to_bytes(4, "big") + b"\x02a\x02b and the rest")


def test_a_frame_of_an_unknown_release_is_told_from_foreign_bytes_in_either_form() -> None:
    newer = MAGIC + b"12345678" + b"body"
    for value in (newer, framed_for_registry(newer, 5)):
        assert is_frame(value)
        assert kind_of(value) is None
        with pytest.raises(RecordError, match="unknown schema fingerprint 3132333435363738; upgrade the reader"):
            decode(value)
    for foreign in (None, b"", b"\x00", b"\x00\x00\x00\x00\x05", b"\x00\x00\x00\x00\x05\xc3", b"{}"):
        assert not is_frame(foreign)


def refusal(value: bytes) -> str:
    """The message of the RecordError, empty if the bytes decode; any other exception fails the test."""
    try:
        decode(value)
    except RecordError as error:
        return str(error)
    return ""


def test_bytes_after_a_record_are_refused() -> None:
    with pytest.raises(RecordError, match="1 bytes follow the Mark"):
        decode(encode(Mark(kind="drain")) + b"\x00")


def test_a_bool_of_another_byte_than_0_and_1_is_refused() -> None:
    value = encode(example_rollout("a", loss_mask=np.array([False, True, True, True])))
    spoiled = value.replace(b"\x00\x01\x01\x01", b"\x00\x01\x02\x01")
    assert spoiled != value
    with pytest.raises(RecordError, match="neither 0 nor 1"):
        decode(spoiled)


def test_text_that_is_not_utf_8_is_refused_in_few_words() -> None:
    value = encode(example_rollout("x" * 100_000)).replace(b"x" * 100_000, b"x" * 99_999 + b"\xff")
    with pytest.raises(RecordError, match="UnicodeDecodeError") as caught:
        decode(value)
    assert len(str(caught.value)) < 500


def test_arrays_are_read_only_views_of_the_bytes_read() -> None:
    rollout = decode_as(Rollout, encode(example_rollout("a")))
    assert not rollout.tokens.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        rollout.tokens[0] = 1


@pytest.mark.parametrize(
    "tokens", [np.array([1, 2], "<i8"), np.array([1, 2], ">i4"), np.array([[1, 2]], "<i4"), np.array([1.0, 2.0])]
)
def test_an_array_of_another_dtype_or_shape_is_refused_with_the_remedy(tokens: Any) -> None:
    with pytest.raises(RecordError, match=re.escape("convert it with numpy.asarray(x, '<i4')")):
        encode(replace(example_rollout("a"), tokens=tokens))


@pytest.mark.parametrize("changes", [{"uid": 5}, {"policy_version": 2**63}, {"reward": None}, {"turns": (1,)}])
def test_a_value_that_does_not_fit_its_field_is_a_record_error(changes: dict[str, Any]) -> None:
    with pytest.raises(RecordError, match="a Rollout does not fit its schema"):
        encode(replace(example_rollout("a"), **changes))


def test_text_with_lone_surrogates_is_a_record_error() -> None:
    with pytest.raises(RecordError, match="does not fit its schema"):
        encode(example_rollout("\ud800"))


def test_values_that_are_no_record_are_refused() -> None:
    with pytest.raises(RecordError, match="int is not a record of rollstream"):
        encode(5)


def test_another_record_than_the_one_asked_for_is_refused() -> None:
    with pytest.raises(RecordError, match="the record is of type Mark instead of Rollout"):
        decode_as(Rollout, encode(Mark(kind="drain")))


def test_a_lack_of_memory_says_nothing_about_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks_memory(*_arguments: Any) -> None:
        raise MemoryError

    value = encode(example_rollout("u", 1.0))
    monkeypatch.setattr("rollstream.topics.wire.codec.fastavro.schemaless_reader", lacks_memory)
    with pytest.raises(MemoryError):
        decode(value)


def test_another_record_than_the_one_asked_for_is_not_decoded_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few bytes of some types take hundreds of times as much memory."""
    value = encode(Mark(kind="drain"))
    monkeypatch.setattr("rollstream.topics.wire.codec.decode", lambda _value: pytest.fail("it was decoded"))
    with pytest.raises(RecordError, match="type Mark instead of Rollout"):
        decode_as(Rollout, value)


def test_the_frame_is_avro_single_object_encoding() -> None:
    value = encode(Mark(kind="drain"))
    assert value[:2] == b"\xc3\x01"
    assert value[2:HEADER_SIZE] == schemas()["Mark"][-1].fingerprint


@given(data=st.binary(min_size=8, max_size=8))
def test_a_named_array_keeps_dtype_shape_and_bits(data: bytes) -> None:
    array = np.frombuffer(data, ">f4").reshape(2, 1)
    named = NamedArray.of(array)
    assert (named.dtype, named.shape) == ("<f4", (2, 1))
    assert named.array().astype(">f4").tobytes() == data
