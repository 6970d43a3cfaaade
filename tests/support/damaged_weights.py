"""Policy versions on the log whose bytes are not those of their manifests."""

from dataclasses import replace

from rollstream.consumers.weights.fetcher import ChunkFetcher
from rollstream.topics.kafka import topic_admin
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from tests.support.runs import RealRun
from tests.support.versions import visible_manifests


def damaged_delta(run: RealRun, version: int) -> None:
    """Publish `version` as a delta on the previous version. It repeats the delta of the previous version with one bit
    flipped, so the result does not match the manifest's digest."""
    before = visible_manifests(run, version - 1)[version - 1]
    assert before.kind == "delta"
    [chunk] = before.chunks
    with ChunkFetcher(run.kafka, run.name) as fetcher:
        [data] = fetcher.fetch(before, timeout_s=300.0)
    [(partition, (_, end))] = topic_admin.bounds(run.kafka, run.topic("weights"), [chunk.partition]).items()
    flipped = data[:-1] + bytes([data[-1] ^ 1])
    run.send_bytes("weights", flipped, encode_key(version, before.epoch, 0), partition)
    manifest = replace(before, version=version, base=version - 1, chunks=(replace(chunk, offset=end),))
    run.send_bytes("policies", encode(manifest), encode_key(version))
