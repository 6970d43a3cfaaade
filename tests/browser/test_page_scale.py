"""The page of a run of very many rollouts in a browser: it is right, and how long it takes is reported."""

import json
import time
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import pytest
from playwright.sync_api import Browser, expect

from rollstream.topics.config import KafkaConfig, TopicsConfig
from rollstream.topics.kafka import clients, provisioning
from tests.browser.chromium import PATIENCE_MS, Visit, visit
from tests.browser.served_run import ServedRun, url_of
from tests.support.index_logs import GROUP, RUN, MadeRun
from tests.support.runs import RealRun
from tests.support.waiting import eventually

pytestmark = pytest.mark.long

ROLLOUTS = 100_000
"""Raise it to a million for an evening: filling the index takes about ten minutes then."""
_PARTITIONS = 4
_PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"


@pytest.fixture(scope="module")
def made(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedRun]:
    """The topics of a made run, and the process that serves its page, once it has indexed all."""
    run = RealRun(KafkaConfig(bootstrap_servers=broker), RUN, tmp_path_factory.mktemp("made"))
    run.topics = TopicsConfig(partitions=_PARTITIONS)
    provisioning.apply(run.kafka, run.topics, run.name)
    write(run, ROLLOUTS)
    process = run.start("ui")
    try:
        served = ServedRun(run, process, url_of(run, process))
        eventually(lambda: listed(served)["matching"] >= ROLLOUTS, 3600, "all rollouts are indexed", every_s=2.0)
        yield served
    finally:
        run.stop()


def write(run: RealRun, count: int) -> None:
    """Write the records of a made run with so many rollouts."""
    producer, chunks, written = clients.producer(run.kafka), MadeRun(partitions=_PARTITIONS), 0
    while written < count:
        for name, record in chunks.chunk():
            written += name == "rollouts"
            while True:
                try:
                    producer.produce(run.topic(name), record.value, record.key or b"made", record.partition)
                    break
                except BufferError:
                    producer.poll(0.1)
        producer.poll(0)
    assert producer.flush(300) == 0


def listed(served: ServedRun, **wanted: str) -> dict[str, Any]:
    """A page of rollouts, as the server answers it."""
    query = urlencode({"limit": 1, **wanted})
    with urllib.request.urlopen(f"{served.url}api/runs/{RUN}/rollouts?{query}", timeout=300) as answer:
        return dict(json.loads(answer.read()))


def filtered_ms(seen: Visit, label: str, choice: str, **query: str) -> float:
    """Time from the choice of a filter to the first row of its answer."""
    state, row = seen.page.locator(".list-state"), seen.page.locator(".list-body .list-row").first
    before = state.inner_text()
    began = time.perf_counter()
    seen.page.get_by_label(label).select_option(choice)
    expect(state).not_to_have_text(before, timeout=PATIENCE_MS)
    expect(state).to_contain_text("match", timeout=PATIENCE_MS)
    row.wait_for()
    return 1000 * (time.perf_counter() - began)


def test_very_many_rollouts_are_painted_filtered_and_searched(
    made: ServedRun, browser: Browser, capsys: pytest.CaptureFixture[str]
) -> None:
    times: list[tuple[str, float]] = []
    for view in ("run", "rollouts", "groups"):
        seen = visit(browser, made.url)
        seen.open(f"#/{RUN}/{view}")
        times.append((f"first paint, {view}", seen.page.evaluate(_PAINT)))
        assert seen.errors == []
        seen.page.context.close()
    seen = visit(browser, made.url)
    seen.open(f"#/{RUN}/rollouts")
    expect(seen.page.locator(".list-state")).to_contain_text("rollouts match", timeout=PATIENCE_MS)
    rows = seen.page.locator(".list-body .list-row")
    for label, choice in (("Environment", "env1"), ("Fate", "dropped"), ("Worker", "worker-2"), ("Order", "reward")):
        times.append((f"filter, {label}", filtered_ms(seen, label, choice)))
    wanted = {"environment": "env1", "fate": "dropped", "worker": "worker-2", "order": "reward"}
    first = listed(made, **wanted)["rows"][0]
    expect(rows.first).to_contain_text(first["place"])
    seen.page.get_by_role("button", name="Clear all").click()
    for text in ("the answer", "case 00000000123", "text that is nowhere"):
        with seen.page.expect_response(lambda answer: "text=" in answer.url) as answered:
            seen.page.get_by_label("Text").fill(text)
        answer = answered.value
        assert answer.json()["matching"] == listed(made, text=text)["matching"]
        answer.finished()
        times.append((f"answer to text {text!r}", answer.request.timing["responseEnd"]))
    assert listed(made, text="case 00000000123")["rows"][0]["uid"] == f"u{123 // GROUP:09d}-{123 % GROUP}"
    assert seen.errors == []
    seen.page.context.close()
    with capsys.disabled():
        print("", *(f"{ms:8.0f} ms  {name}" for name, ms in times), sep="\n  ")
