"""`verify` on a topic of which one bit flipped on the broker's disk."""

import json
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from rollstream.infra.broker.broker import LocalBroker
from rollstream.infra.config import BrokerConfig
from rollstream.topics.config import KafkaConfig
from rollstream.topics.wire.keys import encode_key
from tests.support.command_line import answer_of
from tests.support.planted import plant
from tests.support.runs import RealRun


@pytest.mark.long  # a planted lie says the same of a run over the model
def test_one_flipped_bit_fails_its_batch_alone(tmp_path: Path) -> None:
    config = BrokerConfig(data_dir=tmp_path / "broker")
    with LocalBroker.start(config=config, bound_to_parent=True) as broker, ExitStack() as stack:
        run = RealRun(KafkaConfig(bootstrap_servers=broker.bootstrap_servers), "planted", tmp_path)
        stack.callback(run.stop)
        planted = plant(run)
        where = ("--run", run.name, "-b", broker.bootstrap_servers)

        def told(*words: str) -> "subprocess.CompletedProcess[str]":
            return answer_of(run.directory, *words, *where)

        batch = planted.batches[3]
        broker.stop()
        [segment] = broker.data_dir.glob(f"**/{planted.run.topic('batches')}-{batch.partition}/*.log")
        flip(segment, encode_key(batch.batch_id), batch.tokens.tobytes())
        broker.restart()
        done = told("verify", "--json")
        assert done.returncode == 1, done.stderr
        differences = json.loads(done.stdout)["differences"]
        assert {line.split(":")[0] for line in differences} == {f"batch {batch.batch_id}"}
        assert f"batch {batch.batch_id}: tokens differ from the refold" in differences
        assert told("verify", planted.batches[2].batch_id).returncode == 0
        assert told("verify", batch.batch_id).returncode == 1
        assert told("ledger").returncode == 0


def flip(segment: Path, key: bytes, content: bytes) -> None:
    """Flip one bit of a segment where `content` stands after `key`, and mend the checksum of its record batch.

    Kafka sees nothing wrong then (record batch v2: length at byte 8, crc at 17, of what follows it)."""
    data = bytearray(segment.read_bytes())
    at = data.index(content, data.index(key))
    data[at] ^= 1
    start = 0
    while (end := start + 12 + int.from_bytes(data[start + 8 : start + 12], "big")) <= at:
        start = end
    data[start + 17 : start + 21] = crc32c(bytes(data[start + 21 : end])).to_bytes(4, "big")
    segment.write_bytes(data)


def crc32c(data: bytes) -> int:
    """Castagnoli's checksum, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF
