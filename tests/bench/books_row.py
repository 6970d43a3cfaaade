"""Row `books`: bringing the ledger of a run up to date from its file, against reading all of its topics again."""

from collections.abc import Iterator
from dataclasses import replace
from statistics import median

from rollstream.pipeline.audit.ledger import Ledger, LiveLedger, ledger
from rollstream.topics.records import Mark, Rollout
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from tests.bench import material, produce_baseline
from tests.bench.measure import Row, Settings, Stopwatch, Timing, in_child, interleaved
from tests.bench.runs import prepared

_SHARE = 8
"""The run begins with this many times the rollouts of a portion."""


def measure(settings: Settings) -> Row:
    """Measure a run of all rollouts; before each update from the file, another portion is produced and grouped."""
    # A portion is whole batches, because a remainder would wait in memory for the next portion.
    whole = settings.group_size * settings.partitions
    portion = replace(settings, rollouts=max(whole, settings.rollouts // _SHARE // whole * whole))
    idle_s: list[float] = []
    with prepared(settings, "books") as run:
        produced = _group(settings, run, 0)
        path = settings.directory / run / "books"
        with LiveLedger(settings.kafka, run, path) as books:
            _check(books.poll(), produced)

        def ours() -> Timing:
            nonlocal produced
            produced += _group(portion, run, produced)
            watch = Stopwatch()
            with LiveLedger(settings.kafka, run, path) as books:
                result = books.poll()
            timing = watch.timing(produced)
            _check(result, produced)
            if books.begun_anew:
                raise RuntimeError(f"the ledger was read from the beginning again: {books.begun_anew}")
            again = Stopwatch()
            with LiveLedger(settings.kafka, run, path) as books:
                books.poll()
            idle_s.append(again.timing(produced).seconds)
            return timing

        def raw() -> Timing:
            watch = Stopwatch()
            result = ledger(settings.kafka, run)
            timing = watch.timing(produced)
            _check(result, produced)
            return timing

        live, whole_readings = interleaved(settings.repetitions, ours, raw)
        size = path.stat().st_size
    return Row(
        name="books",
        what=f"bring the ledger of a run up to date from its file: {portion.rollouts:,} of its rollouts are new",
        baseline="read all of its topics and prove the same",
        size_bytes=len(encode(next(material.rollouts(settings)))),
        ours=live,
        raw=whole_readings,
        figures={
            "new rollouts/s": median(portion.rollouts / timing.seconds for timing in live),
            "s up to date": median(timing.seconds for timing in live),
            "s with nothing new": median(idle_s),
            "s of a full reading": median(timing.seconds for timing in whole_readings),
            "bytes of the file": size,
        },
    )


def _group(settings: Settings, run: str, before: int) -> int:
    """Produce `settings.rollouts` rollouts after the `before` earlier ones, and group them; return their number."""
    records = [
        (encode_key(rollout.environment, rollout.example_id), encode(rollout)) for rollout in _named(settings, before)
    ]
    # The benchmark's grouping process ends after it has committed its rollouts and one mark for each partition.
    if before:
        mark = encode(Mark(kind="policy_version", policy_version=0, author="bench"))
        records += [(encode_key("mark", number), mark) for number in range(settings.partitions)]
    produce_baseline.measure(settings.kafka, topic_name(run, "rollouts"), records)
    in_child("grouping_process", settings, run)
    return settings.rollouts // settings.group_size * settings.group_size


def _named(settings: Settings, before: int) -> Iterator[Rollout]:
    for rollout in material.rollouts(settings, before):
        example = f"{before}-{rollout.example_id}"
        yield replace(rollout, uid=f"{before}-{rollout.uid}", group_id=example, example_id=example)


def _check(result: Ledger, produced: int) -> None:
    if not result.balanced or result.rollouts != produced:
        raise RuntimeError(f"{result.rollouts} of {produced} rollouts are on the books: {result.problems}")
