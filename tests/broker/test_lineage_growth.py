"""A question about one rollout costs as much on a long log as on a short one; the records are made, the broker is real.

Reports the processor time of filling the index, and of a question to it.
"""

import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.index.indexed_run import indexed_run
from rollstream.pipeline.index.lineage import record_lineage
from rollstream.topics.config import KafkaConfig, TopicsConfig
from rollstream.topics.kafka import clients, provisioning
from rollstream.topics.wire.catalogue import topic_name
from tests.support.index_logs import MadeRun

PARTITIONS = 4
QUESTIONS = 20


def write(kafka: KafkaConfig, run: str, made: MadeRun, rollouts: int) -> int:
    """Write chunks of the run until they hold so many rollouts; every record gets the offset that it was made for."""
    producer, written = clients.producer(kafka), 0
    while written < rollouts:
        for name, record in made.chunk():
            written += name == "rollouts"
            while True:
                try:
                    producer.produce(topic_name(run, name), record.value, record.key, record.partition)
                    break
                except BufferError:
                    producer.poll(0.1)
        producer.poll(0)
    assert producer.flush(600) == 0
    return written


def uids(written: int) -> Iterator[str]:
    """Some uids of the run, spread over all of it."""
    examples = written // 9
    for number in range(QUESTIONS):
        yield f"u{number * examples // QUESTIONS:09d}-{number % 8}"


@pytest.mark.parametrize(
    "sizes", [(2_000, 20_000), pytest.param((10_000, 100_000, 1_000_000), marks=pytest.mark.long)], ids=["few", "many"]
)
@pytest.mark.timeout(3600)
@pytest.mark.long
def test_a_question_about_one_rollout_costs_the_same_on_a_longer_log(
    sizes: tuple[int, ...], broker: str, run_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kafka = KafkaConfig(bootstrap_servers=broker)
    provisioning.apply(kafka, TopicsConfig(partitions=PARTITIONS), run_name)
    made, written, costs, lines = MadeRun(partitions=PARTITIONS), 0, [], []
    for size in sizes:
        written += write(kafka, run_name, made, size - written)
        began = time.process_time()
        with indexed_run(RunConfig(run=run_name, kafka=kafka, data_dir=tmp_path)) as view:
            filled = time.process_time() - began
            request = []
            for uid in uids(written):
                began = time.process_time()
                [place] = view.places_of(uid)
                record_lineage(view, place)
                request.append(time.process_time() - began)
        costs.append(statistics.median(request))
        lines.append(
            f"{written:>9,} rollouts: {filled:.2f} s for the new records, {1000 * costs[-1]:.1f} ms a question"
        )
    with capsys.disabled():
        print("\nprocessor time:", *lines, sep="\n  ")
    # The longest log has ten or a hundred times the records of the shortest.
    assert costs[-1] < 3 * costs[0]
