"""Samples of a TransferQueue on the log: puts are whole, places lead back to what was put, one driver writes."""

import io
import json
import threading
from contextlib import closing, redirect_stdout

import numpy as np
import pytest

from rollstream.consumers.ordinal_claim import OrdinalClaim
from rollstream.consumers.trainers.sample_log import (
    POSITIONS,
    SamplePlace,
    SampleReader,
    SampleWriter,
    checkpoint_ends,
    cleared_marks,
    digest_of,
    live_samples,
    record_of,
    topic_identity,
)
from rollstream.pipeline.command_line.cli import main
from rollstream.topics.errors import ConfigurationError, Fenced, RecordTooLarge, StateRefused, TopicError
from rollstream.topics.kafka import topic_admin
from rollstream.topics.records import SampleField
from tests.support.runs import RealRun

PARTITIONS = 2


@pytest.fixture
def run(real_run: RealRun) -> RealRun:
    return real_run.prepare()


def claim_of(run: RealRun) -> OrdinalClaim:
    claim = OrdinalClaim(run.kafka, run.name, f"{run.name}.samples", "writers")
    claim.take()
    return claim


def writer_of(run: RealRun, claim: OrdinalClaim | None = None) -> SampleWriter:
    return SampleWriter(run.kafka, run.name, 0, claim or claim_of(run))


def field(sample: str, name: str = "tokens", data: bytes = b"12345678", partition_id: str = "train_0") -> SampleField:
    return SampleField(partition_id=partition_id, sample=sample, field=name, dtype="int32", shape=(2,), data=data)


def put(writer: SampleWriter, *fields: SampleField) -> list[SamplePlace]:
    records = [record_of(each, PARTITIONS) for each in fields]
    offsets = writer.write(records)
    return [SamplePlace(r.partition, o, digest_of(f.data)) for r, o, f in zip(records, offsets, fields, strict=True)]


def test_fields_are_read_by_their_places_in_any_order_and_over_any_gap(run: RealRun) -> None:
    with closing(writer_of(run)) as writer, SampleReader(run.kafka, run.name) as reader:
        assert reader.partitions == PARTITIONS
        fields = [field(f"k{n}", name, f"{n}{name}".encode()) for n in range(160) for name in ("a", "b")]
        places = [place for n in range(0, 320, 4) for place in put(writer, *fields[n : n + 4])]
        assert {place.partition for place in places} == {0, 1}
        for sample in range(160):
            assert places[2 * sample].partition == places[2 * sample + 1].partition, "a sample is on one partition"
        chosen = [319, 0, 7, 318, 2, 0, 201]
        assert reader.fetch(places[n] for n in chosen) == [fields[n] for n in chosen]
        assert reader.fetch(places) == fields, "the same reader goes back"
        assert reader.fetch([]) == []


def test_a_place_that_holds_something_else_is_an_error(run: RealRun) -> None:
    with closing(writer_of(run)) as writer, SampleReader(run.kafka, run.name) as reader:
        [place, *_others] = put(writer, field("k"), field("k", "other", b"other"))
        wrong = place._replace(digest=digest_of(b"another"))
        with pytest.raises(TopicError, match=rf"offset {place.offset} does not hold the field that was put there"):
            reader.fetch([wrong])
        marker = place._replace(offset=place.offset + 2)
        put(writer, field("k", "later"))
        with pytest.raises(TopicError, match="does not hold"):
            reader.fetch([marker])


def test_what_is_live_is_what_was_put_and_not_cleared_since(run: RealRun) -> None:
    with closing(writer_of(run)) as writer:
        put(writer, *[field(f"k{n}", data=b"old") for n in range(8)])
        ends = {p: end for p, (_begin, end) in topic_admin.bounds(run.kafka, run.topic("samples")).items()}
        [newest] = put(writer, field("k1", data=b"new"))
        put(writer, field("k1", "reward"), field("k1", partition_id="train_1"))
        writer.write(cleared_marks([("train_0", f"k{n}") for n in range(2, 8)], PARTITIONS))
        put(writer, field("k3", data=b"again"))

        live = live_samples(run.kafka, run.name)
        assert sorted(live) == [("train_0", "k0"), ("train_0", "k1"), ("train_0", "k3"), ("train_1", "k1")]
        assert sorted(live["train_0", "k1"]) == ["reward", "tokens"]
        assert live["train_0", "k1"]["tokens"].place == newest
        assert live["train_0", "k1"]["tokens"].record.data == b"", "the data stays on the log"
        assert len(live_samples(run.kafka, run.name, ends)) == 9, "what was cleared after a checkpoint is there again"
        put(writer, field("k9"))
        later = {p: end for p, (_begin, end) in topic_admin.bounds(run.kafka, run.topic("samples")).items()}
        assert len(live_samples(run.kafka, run.name, later)) == 5, "what was cleared before it is not"


def pruned(run: RealRun, *flags: str) -> dict[int, int]:
    """Run `rollstream prune`; return the first offset that is kept of each partition of samples."""
    _python, _safe, _m, _pipeline, *words = run.command("prune", "--yes", "--json", *flags)
    with redirect_stdout(io.StringIO()) as out:
        assert main(words) == 0
    return {row["partition"]: row["to"] for row in json.loads(out.getvalue())["plan"] if row["topic"] == "samples"}


def test_the_checkpoint_of_another_topic_prunes_nothing(run: RealRun) -> None:
    (run.directory / POSITIONS).write_text(json.dumps({"ends": {"0": 1}, "topic": "other.samples", "topic_id": "x"}))
    with pytest.raises(StateRefused, match=r"was made with other\.samples"):
        checkpoint_ends(run.kafka, run.name, run.directory)
    with pytest.raises(ConfigurationError, match="no part of a checkpoint"):
        checkpoint_ends(run.kafka, run.name, run.directory / "nothing")


def test_pruning_keeps_what_was_live_at_a_checkpoint_and_all_after_it(run: RealRun) -> None:
    with closing(writer_of(run)) as writer, SampleReader(run.kafka, run.name) as reader:
        places = [place for n in range(12) for place in put(writer, field(f"k{n}"))]
        writer.write(cleared_marks([("train_0", f"k{n}") for n in range(6)], PARTITIONS))
        ends = {p: end for p, (_begin, end) in topic_admin.bounds(run.kafka, run.topic("samples")).items()}
        writer.write(cleared_marks([("train_0", f"k{n}") for n in range(6, 12)], PARTITIONS))
        folder = run.directory / "queue"
        folder.mkdir()
        (folder / POSITIONS).write_text(json.dumps({"ends": ends, **topic_identity(run.kafka, run.name)}))
        assert set(pruned(run).values()) == {0}, "without a checkpoint nothing is deleted"
        kept = pruned(run, "--queue-checkpoint", str(folder))
        assert kept == {p: min(place.offset for place in places[6:] if place.partition == p) for p in range(PARTITIONS)}
        assert all(kept[place.partition] > place.offset for place in places[:6])
        assert len(reader.fetch(places[6:])) == 6
        assert len(live_samples(run.kafka, run.name, ends)) == 6
        with pytest.raises(TopicError):
            reader.fetch(places[:1])


def test_the_next_driver_fences_the_one_before_and_its_restarted_writers(run: RealRun) -> None:
    first_claim = claim_of(run)
    first = writer_of(run, first_claim)
    put(first, field("k0"))
    with closing(writer_of(run, first_claim)) as restarted:
        put(restarted, field("k1"))
        with closing(writer_of(run)) as second:
            put(second, field("k2"))
            with pytest.raises(Fenced, match="another driver has taken over the samples"):
                put(restarted, field("k3"))
            with pytest.raises(Fenced, match="another driver has taken over the samples"):
                writer_of(run, first_claim)
            put(second, field("k4"))
    assert [name for _partition, name in sorted(live_samples(run.kafka, run.name))] == ["k0", "k1", "k2", "k4"]


def test_puts_that_wait_for_each_other_share_a_transaction_and_no_errors(run: RealRun) -> None:
    noise, places, refused = np.random.default_rng(0).bytes(2 * run.kafka.max_record_bytes), {}, []

    def put_one(writer: SampleWriter, number: int) -> None:
        try:
            places[number] = put(writer, field(f"k{number}", data=noise if number == 3 else b"12345678"))
        except RecordTooLarge:
            refused.append(number)

    with closing(writer_of(run)) as writer:
        threads = [threading.Thread(target=put_one, args=(writer, number)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert refused == [3]
    assert sorted(places) == [0, 1, 2, 4, 5, 6, 7]
    live = live_samples(run.kafka, run.name)
    assert {fields["tokens"].place for fields in live.values()} == {place for [place] in places.values()}


def test_a_field_above_the_limit_is_refused_and_nothing_else_is_lost(run: RealRun) -> None:
    noise = np.random.default_rng(0).bytes(2 * run.kafka.max_record_bytes)
    with closing(writer_of(run)) as writer:
        put(writer, field("k0"))
        with pytest.raises(RecordTooLarge, match=r"kafka\.max_record_bytes"):
            put(writer, field("k1"), field("k1", "media", noise))
        put(writer, field("k2"))
    assert sorted(name for _partition, name in live_samples(run.kafka, run.name)) == ["k0", "k2"], "a put is whole"
