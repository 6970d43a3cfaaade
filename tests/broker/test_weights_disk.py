"""The disk that versions take: at most twice what is kept of them, and what was sent within a minute."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.publisher import WeightsPublisher
from rollstream.consumers.weights.step_log import StepLog
from rollstream.infra.broker.broker import LocalBroker
from rollstream.infra.config import BrokerConfig
from rollstream.topics.config import KafkaConfig
from tests.support.runs import RealRun
from tests.support.waiting import eventually

VERSION_BYTES = 8 * 1024 * 1024
KEPT = 2
VERSIONS = 60
SEGMENT_BYTES = 64 * 1024 * 1024


@pytest.mark.long
def test_a_minute_after_its_last_version_the_log_takes_at_most_twice_the_bytes_that_are_kept(tmp_path: Path) -> None:
    def taken() -> int:
        files = (tmp_path / "broker").rglob(f"{run.topic('weights')}-0/*.log")
        return sum(file.stat().st_size for file in files)

    config = WeightsConfig(anchor_every=1, keep_versions=KEPT)
    with LocalBroker.start(config=BrokerConfig(data_dir=tmp_path / "broker"), bound_to_parent=True) as broker:
        run = RealRun(KafkaConfig(bootstrap_servers=broker.bootstrap_servers), "disk", tmp_path).prepare()
        noise = np.random.default_rng(0)
        with (
            closing(StepLog(run.kafka, run.name, "test")) as log,
            closing(WeightsPublisher(run.kafka, run.name, "test", "{}", config)) as source,
        ):
            for step in range(1, VERSIONS):
                manifest = source.stage(step, {"noise": noise.integers(0, 255, VERSION_BYTES, np.uint8)})
                log.commit([source.record(manifest)])
                source.committed(manifest)
        # Twice what is kept, and the newest segments, from which nothing is removed.
        limit = 2 * KEPT * VERSION_BYTES + 2 * SEGMENT_BYTES
        assert limit < VERSIONS * VERSION_BYTES / 2
        eventually(lambda: taken() <= limit, 120, f"the log to shrink to {limit} bytes")
        print(f"{taken() / 2**20:.0f} MiB for {KEPT} versions of {VERSION_BYTES / 2**20:.0f} MiB")
        # The versions that are kept are still there.
        assert taken() > KEPT * VERSION_BYTES
