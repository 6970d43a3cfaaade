"""Keys and partitions: the vectors of Kafka's own tests, and the keys a foreign client would write."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.topics.errors import RecordError
from rollstream.topics.wire.keys import decode_key, encode_key, murmur2, partition_of


@pytest.mark.parametrize(
    ("data", "signed"),
    [
        # org.apache.kafka.common.utils.UtilsTest.testMurmur2
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_murmur2_is_that_of_kafka_s_java_client(data: bytes, signed: int) -> None:
    assert int(np.uint32(murmur2(data)).view(np.int32)) == signed


def test_a_partition_is_the_positive_hash_modulo_the_count() -> None:
    assert [partition_of(b"21", n) for n in (1, 2, 7)] == [(-973932308 & 0x7FFFFFFF) % n for n in (1, 2, 7)]


def test_a_key_is_a_compact_json_array_in_utf_8() -> None:
    assert encode_key("env", "example") == b'["env","example"]'
    assert encode_key("zählen", "\N{SNOWMAN}", 3) == '["zählen","\N{SNOWMAN}",3]'.encode()


@given(parts=st.lists(st.one_of(st.text(st.characters(exclude_categories=["Cs"])), st.integers())))
def test_a_key_is_read_back_as_written(parts: list[str | int]) -> None:
    assert decode_key(encode_key(*parts)) == tuple(parts)


@given(key=st.one_of(st.none(), st.binary(), st.sampled_from([b"{}", b"1", b"[" * 100_000, b'["' + b"x" * 10_000])))
def test_whatever_is_no_key_is_a_record_error_of_one_line(key: bytes | None) -> None:
    try:
        words = str(len(decode_key(key)))
    except RecordError as error:
        words = str(error)
    assert len(words) < 1_000
    assert "\n" not in words


@pytest.mark.parametrize("key", [b'[[],"x"]', b'[{},"x"]', b"[null]", b"[1.5]", b"[true]"])
def test_a_key_has_only_texts_and_whole_numbers(key: bytes) -> None:
    with pytest.raises(RecordError, match="texts and whole numbers"):
        decode_key(key)


@given(key=st.binary(max_size=64), partitions=st.integers(1, 1_000))
def test_every_key_has_a_partition(key: bytes, partitions: int) -> None:
    assert 0 <= partition_of(key, partitions) < partitions
