"""Links of the page lead to the rollouts that they count, on a run with a learner and a session."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from rollstream.topics.config import KafkaConfig
from rollstream.topics.records import SessionEvent
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from tests.browser.chromium import PATIENCE_MS, visit
from tests.browser.served_run import ServedRun, command
from tests.support.planted import plant
from tests.support.runs import RealRun

UIDS = ("good1-0", "good1-1")


@pytest.fixture(scope="module")
def trained(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedRun]:
    """A run whose learner trained on one batch and skipped another, with a session of an agent."""
    run = RealRun(KafkaConfig(bootstrap_servers=broker), "linked", tmp_path_factory.mktemp("linked"))
    try:
        plant(run)
        start = SessionEvent(session="good1", kind="start", author="a", environment="env", group_id="g", wall_time=1.0)
        finished = SessionEvent(session="good1", kind="finished", author="a", uids=UIDS, wall_time=1.0)
        for event in (start, finished):
            run.send_bytes("calls", encode(event), encode_key("good1"), 0)
        yield ServedRun.start(run)
    finally:
        run.stop()


@pytest.mark.long
def test_batched_rollouts_of_the_ledger_are_listed_whatever_a_learner_did(trained: ServedRun, browser: Browser) -> None:
    batched = command(trained, "ledger")["batched"]
    seen = visit(browser, trained.url)
    seen.open(f"#/{trained.run.name}/ledger")
    place = seen.page.locator(".places tr", has=seen.page.locator("th", has_text=re.compile("batched$")))
    place.get_by_role("button").click()
    seen.page.get_by_role("link", name="List these rollouts").click()
    expect(seen.page.locator(".list-state")).to_contain_text(f"{batched} rollouts match", timeout=PATIENCE_MS)
    expect(seen.page.get_by_label("Fate")).to_have_value("batched,trained,skipped")
    assert seen.errors == []
    seen.page.context.close()


def test_a_session_leads_to_each_of_its_rollouts(trained: ServedRun, browser: Browser) -> None:
    seen = visit(browser, trained.url)
    for uid in UIDS:
        seen.open(f"#/{trained.run.name}/sessions?open=good1")
        seen.page.get_by_role("link", name=uid, exact=True).click()
        expect(seen.page.locator(".list-state")).to_contain_text("1 rollout matches", timeout=PATIENCE_MS)
    assert seen.errors == []
    seen.page.context.close()
