"""Dead letters against the journal: one for each record that it calls dead-lettered, and no other."""

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from consumers.grouping.changes import DEAD_LETTERED
from pipeline.journals import PartitionJournal
from pipeline.ledger.book import PATIENCE_S, Ledger
from topics import clients
from topics.catalogue import name_in_run, topic_name
from topics.config import KafkaConfig

REDRIVEN = "rollstream.redriven"
"""Header of a note in dead-letters: the offset there of the letter that was sent again."""


def check_dead_letters(kafka: KafkaConfig, run: str, journals: dict[int, PartitionJournal], result: Ledger) -> None:
    """Dead letters against the journal. They are never pruned: of those of before its beginning the number must be."""
    wanted = sum(len(journal.offsets(DEAD_LETTERED)) for journal in journals.values())
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = Ledger()
        letters = _read_dead_letters(kafka, run, journals, found)
        if sum(map(len, letters.values())) >= wanted or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    for text in found.problems:
        result.problem(text)
    for number, journal in journals.items():
        named, here = journal.offsets(DEAD_LETTERED), letters[number]
        before = {offset for offset in here if journal.settled_before(offset)}
        if len(before) != journal.before[DEAD_LETTERED]:
            result.problem(
                f"rollouts[{number}]: {len(before)} records below offset {journal.base} are in dead-letters, the "
                f"journal counts {journal.before[DEAD_LETTERED]}"
            )
        for offset in sorted(named.symmetric_difference(here.keys() - before)):
            place = "the journal alone" if offset in named else "the topic alone"
            result.problem(f"rollouts[{number}] offset {offset} is dead-lettered in {place}")
        for offset, times in here.items():
            if times > 1:
                result.problem(f"rollouts[{number}] offset {offset} is dead-lettered {times} times")


def of_rollouts(headers: Mapping[str, Any]) -> bool:
    """Whether a dead letter was in `rollouts`, of this run or of the one it was restored from."""
    source = (headers.get("__streams.errors.topic") or b"rollouts").decode(errors="replace")
    return name_in_run(source) == "rollouts"


def _read_dead_letters(
    kafka: KafkaConfig, run: str, journals: dict[int, PartitionJournal], result: Ledger
) -> dict[int, Counter[int]]:
    found: dict[int, Counter[int]] = {p: Counter() for p in journals}
    for message in clients.read_to_end(kafka, topic_name(run, "dead-letters")):
        headers: dict[str, Any] = dict(message.headers() or [])
        if REDRIVEN in headers:
            continue  # A note that a letter was sent again, which is another record of rollouts.
        if not of_rollouts(headers):
            continue  # Of trajectories that could not be labelled.
        try:
            number = int(headers["__streams.errors.partition"])
            offset = int(headers["__streams.errors.offset"])
            position = journals[number].position
        except (KeyError, ValueError, TypeError):
            result.problem(f"dead-letters offset {message.offset()} names no partition and offset of rollouts")
            continue
        if offset < position:
            found[number][offset] += 1
    return found
