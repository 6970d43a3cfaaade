"""Fixtures of tests in a browser: a Chromium, and a run whose page is served as a user serves it."""

import uuid
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from rollstream.consumers.models.tokenizer_log import put_tokenizer
from rollstream.topics.config import KafkaConfig
from rollstream.topics.records import Turn
from tests.browser import chromium
from tests.browser.served_run import GROUPS, HOSTILE, ServedRun
from tests.support.runs import RealRun, rollout
from tests.support.settled import settled


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    # Not for the session: a running browser has an event loop, and tests of other files run their own.
    with chromium.started() as browser:
        yield browser


@pytest.fixture(scope="module")
def served(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedRun]:
    """A run with batches, drops, a dead letter and hostile texts, its grouping process, and its page."""
    # Test files share a broker, and each has a run of its own.
    name = f"browsed-{uuid.uuid4().hex[:8]}"
    run = RealRun(KafkaConfig(bootstrap_servers=broker), name, tmp_path_factory.mktemp("browsed")).prepare()
    try:
        put_tokenizer(run.kafka, run.name, "")
        run.start("group")
        run.send(
            rollout(
                f"x{n}",
                member,
                reward=float(member == n % 4),
                turns=(
                    Turn(role="user", text=f"prompt {n}", start=0, stop=3),
                    Turn(role="assistant", text=f"answer {member} {HOSTILE}", start=3, stop=6, has_logprobs=True),
                ),
            )
            for n in range(GROUPS)
            for member in range(4)
        )
        run.send(rollout("flat", member, reward=1.0) for member in range(4))
        run.send_bytes("rollouts", HOSTILE.encode(), b"key", 0)
        settled(run, in_flight=0)
        yield ServedRun.start(run)
    finally:
        run.stop()
