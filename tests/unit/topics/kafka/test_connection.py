"""The error names why no broker answers at an address."""

import socket
from pathlib import Path

import pytest

from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import AccessDenied, BrokerUnavailable
from rollstream.topics.kafka.connection import check_broker


@pytest.mark.parametrize("authorities", ["a directory", "probe"])
def test_a_broker_that_is_away_is_no_fault_of_its_certificate_wherever_the_authorities_are(
    authorities: str, tmp_path: Path
) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # Bound, and not listened on, so that connections are refused.
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        place = str(tmp_path) if authorities == "a directory" else authorities
        client = {"security.protocol": "SSL", "ssl.ca.location": place}
        with pytest.raises(BrokerUnavailable, match="nothing accepts connections") as refusal:
            check_broker(KafkaConfig(bootstrap_servers=address, client=client), 1.0)
    assert not isinstance(refusal.value, AccessDenied)
