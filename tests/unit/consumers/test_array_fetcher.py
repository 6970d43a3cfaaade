"""ArrayFetcher reads what it is asked for, and writes one dead letter for each row that lacks an array."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollstream.consumers import array_fetcher
from rollstream.consumers.array_fetcher import ArrayFetcher
from rollstream.topics.closing import Closing
from rollstream.topics.config import ArraysConfig, KafkaConfig
from rollstream.topics.errors import DeliveryError
from rollstream.topics.files.stored_arrays import StoredArrays
from rollstream.topics.kafka import clients
from rollstream.topics.records import BatchIndexEntry, BatchTokenArray, NamedArray
from rollstream.topics.wire.rl_examples import ROUTED_EXPERTS, SAMPLING_MASK
from tests.support.batches import random_batch


class Letters(Closing):
    """Stands in for the sender of dead letters."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses, self.messages, self.closed = refuses, list[str](), False

    def send(self, _topic: str, _value: bytes | None, _key: bytes, *, partition: int, headers: dict[str, Any]) -> None:
        self.messages.append(f"{partition}: {headers['__streams.errors.message']}")

    def flush(self, _timeout_s: float) -> None:
        if self.refuses:
            raise DeliveryError("no broker answers")

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("refuses", [False, True])
def test_a_mask_with_negative_ids_and_a_missing_array_are_one_letter_for_their_row(
    refuses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kafka = KafkaConfig(bootstrap_servers="127.0.0.1:1", arrays=ArraysConfig(url=str(tmp_path)))
    store, letters = StoredArrays.of("main", kafka.arrays), Letters(refuses=refuses)
    monkeypatch.setattr(clients, "producer", lambda _kafka: None)
    monkeypatch.setattr(array_fetcher, "Sender", lambda _producer: letters)
    gone = NamedArray(dtype="|u1", shape=(2, 4), stored=f"20261130/{'ab' * 32}")
    arrays = [
        (SAMPLING_MASK, 0, store.put(NamedArray.of(np.array([5, 6], "<i4")))),
        (SAMPLING_MASK, 2, store.put(NamedArray.of(np.array([5, -6], "<i4")))),
        (ROUTED_EXPERTS, 2, gone),
        ("hidden", 3, gone),
    ]
    entries = tuple(BatchTokenArray(name=name, array=a, rows=np.array([row], "<i4")) for name, row, a in arrays)
    batch = replace(random_batch(0), token_arrays=entries)
    fetcher = ArrayFetcher(kafka, "main", (SAMPLING_MASK, ROUTED_EXPERTS))
    fetched = fetcher.fetch(BatchIndexEntry.of(batch, 7), batch)
    found = [entry.array for entry in fetched.batch.token_arrays]
    assert found[0].array().tolist() == [5, 6]
    assert found[1:] == [array for _name, _row, array in arrays[1:]]
    [(row, reason)] = fetched.missing.items()
    assert row == 2
    assert f"uid {batch.uids[2]}" in reason
    assert "holds a negative id; array routed_experts of row 2" in reason
    assert reason.endswith(f"{gone.stored} is missing")
    assert (letters.messages, letters.closed) == ([f"{batch.partition}: {reason}"], True)
