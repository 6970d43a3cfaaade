"""Acknowledgements of records."""

import pytest

from rollstream.topics.errors import DeliveryError
from rollstream.topics.kafka.sender import Delivery


def test_an_offset_that_the_broker_did_not_tell_is_no_offset() -> None:
    assert Delivery("run.batches", 2, 7, 0, False).offset == 7
    with pytest.raises(DeliveryError, match=r"run\.batches\[2\] acknowledged a record without its offset"):
        _ = Delivery("run.batches", 2, None, 0, False).offset
