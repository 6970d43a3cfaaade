"""A scanner reads every number that fits into 64 bits, and leaves any other to the decoder."""

import pytest

from rollstream.topics.wire.codec import Schema
from rollstream.topics.wire.frame_pieces import number_bytes
from rollstream.topics.wire.frame_scanner import scanner

SCAN = scanner(Schema("X", 1, {"fields": [{"name": "x", "type": "long"}]}, None, b""), ["x"])


@pytest.mark.parametrize("number", [0, -1, 63, 64, -65, 2**31, 2**61, 2**62, 2**63 - 1, -(2**63)])
def test_a_number_of_64_bits_is_read(number: int) -> None:
    assert SCAN(number_bytes(number), 0) == (number, len(number_bytes(number)))


@pytest.mark.parametrize("number", [b"\xff" * 9 + b"\x02", b"\x80" * 10 + b"\x00"])
def test_a_longer_number_is_left_to_the_decoder(number: bytes) -> None:
    with pytest.raises(ValueError, match="more than 64 bits"):
        SCAN(number, 0)
