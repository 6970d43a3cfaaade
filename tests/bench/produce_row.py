"""Row `produce`: RolloutProducer from dataclasses to acknowledged records, against producing the same bytes raw."""

from rollstream.producers.rollout_producer import RolloutProducer
from rollstream.topics.wire.catalogue import topic_name
from tests.bench import material, produce_baseline
from tests.bench.measure import Row, Settings, Stopwatch, Timing, interleaved
from tests.bench.runs import prepared


def measure(settings: Settings) -> Row:
    """Checks, encoding, keys and delivery reports included; connecting is not."""
    subjects = list(material.rollouts(settings))
    records = material.encoded(settings)
    with prepared(settings, "produce") as run:

        def ours() -> Timing:
            with RolloutProducer(settings.kafka, run) as producer:
                watch = Stopwatch()
                for subject in subjects:
                    producer.send(subject)
                producer.flush(120)
                return watch.timing(len(subjects))

        topic = topic_name(run, "rollouts")
        rates, raw = interleaved(
            settings.repetitions, ours, lambda: produce_baseline.measure(settings.kafka, topic, records)
        )
    return Row(
        name="produce",
        what="RolloutProducer: check, encode, produce, acknowledged",
        baseline="the same bytes encoded beforehand, same client settings",
        ours=rates,
        raw=raw,
        size_bytes=len(records[0][1]),
        tokens=settings.tokens,
    )
