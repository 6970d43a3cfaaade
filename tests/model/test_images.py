"""Images of rollouts: one object for a group, in batches for trainers, and shown from the log and from archives."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rollstream.consumers.batch_reader import BatchReader
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.index.indexed_run import RolloutPlace
from rollstream.pipeline.index.run_index import RunIndex
from rollstream.producers.rollout_producer import RolloutProducer
from rollstream.topics.config import ArraysConfig
from rollstream.topics.errors import TopicError
from rollstream.topics.files.stored_arrays import StoredArrays
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.wire.media import MEDIA, Medium, media_arrays
from tests.support.runs import RealRun, rollout
from tests.support.settled import settled

PNG, GIF = b"\x89PNG of two dots", b"GIF89a"


def test_images_of_a_group_are_objects_that_trainers_and_people_get(real_run: RealRun) -> None:
    run = real_run
    run.kafka = replace(run.kafka, arrays=ArraysConfig(url=str(run.directory / "store")))
    run.grouping = replace(run.grouping, batch_rollouts=4)
    run.prepare()
    settings = {"kafka__arrays__url": run.kafka.arrays.url}
    images = media_arrays([("image/png", PNG), ("image/gif", GIF)], [(0, 2), (2, 3)], 6)
    process = run.start("group", **settings)
    with RolloutProducer(run.kafka, run.name) as producer:
        for member in range(4):
            producer.send(rollout("x", member, token_arrays=images))
    settled(run, batched=4, in_flight=0)
    process.terminate()
    assert process.wait(300) == 0
    store = StoredArrays.of(run.name, run.kafka.arrays)
    assert len(store.sizes()) == 2, "the members of a group share them"

    with BatchReader(run.kafka, run.name) as reader:
        read = reader.poll(60)
        assert read is not None
        assert not any(medium.array.data for example in read.examples() for medium in example.media)
    with BatchReader(run.kafka, run.name, arrays=(MEDIA,), wait_s=5) as reader:
        read = reader.poll(60)
        assert read is not None
    media = [[(m.media_type, m.data, m.start, m.stop) for m in example.media] for example in read.examples()]
    assert media == [[("image/png", PNG, 0, 2), ("image/gif", GIF, 2, 3)]] * 4

    first, second = read.examples()[0].media
    shown = run.told("show", "x-0", **settings)
    assert f"\n{first}\n{second}\n" in shown
    assert "array media_tokens: <i2 [6]" in shown
    assert "array media/" not in shown
    archive = str(run.directory / "archive")
    run.told("archive", archive, **settings)
    assert json.loads(run.told("archive", archive, "--check", "--json", **settings))["arrays"] == 2
    source, config = read.examples()[0].source, RunConfig(run=run.name, kafka=run.kafka, data_dir=run.directory)
    place = RolloutPlace(source.partition, source.offset)

    def of_page(archive: str, number: int) -> Medium:
        with RunIndex.open(config, archive) as index:
            index.catch_up()
            answer = index.details(place)["media"]
            assert [each["text"] for each in answer] == [str(first), str(second)]
            return index.medium(place, number)

    for at in ("", archive):
        assert (of_page(at, 0).data, of_page(at, 1).data) == (PNG, GIF)
        with pytest.raises(TopicError, match="has 2 images, and none of number 2"):
            of_page(at, 2)

    [name] = [name for name in store.sizes() if name.endswith(second.digest)]
    Path(run.kafka.arrays.url, run.name, "arrays", name).unlink()
    with pytest.raises(TopicError, match=f"{name} is missing"):
        of_page("", 1)
    assert of_page(archive, 1).data == GIF
    with BatchReader(run.kafka, run.name, arrays=(MEDIA,), wait_s=5) as reader:
        read = reader.poll(60)
    assert read is not None
    assert (sorted(read.missing), read.examples()) == ([0, 1, 2, 3], [])
    letters = [dict(message.header_pairs()) for message in read_to_end(run.kafka, run.topic("dead-letters"))]
    reasons = [letter["__streams.errors.message"] or b"" for letter in letters]
    assert [reason.partition(b" of row")[0] for reason in reasons] == [b"array media/1/image/gif"] * 4
