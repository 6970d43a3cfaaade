"""Transactions that commit while somebody waits for them, as if their markers came late."""

from typing import Any

import pytest

from rollstream.topics.kafka import open_transactions
from rollstream.topics.kafka.open_transactions import undecided


def committed_at_second_look(producer: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Commit the producer's transaction when `undecided` is asked the second time; the looks are added to the list."""
    looks: list[tuple[Any, ...]] = []

    def look(*place: Any) -> object:
        looks.append(place)
        if len(looks) == 2:
            producer.commit_transaction(120)
        return undecided(*place)

    monkeypatch.setattr(open_transactions, "undecided", look)
    return looks
