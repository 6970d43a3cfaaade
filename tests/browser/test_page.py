"""The page in a browser, on a real run, served as a user serves it."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from rollstream.topics.config import KafkaConfig
from tests.browser.chromium import PATIENCE_MS, visit
from tests.browser.served_run import ServedRun, await_index, command, url_of
from tests.support.runs import RealRun, rollout
from tests.support.waiting import eventually


def test_the_run_is_shown_as_the_command_line_has_it(served: ServedRun, browser: Browser) -> None:
    """The policy refuses nothing either, and axe finds nothing serious, by day and on a phone at night."""
    for dark in (False, True):
        seen = visit(browser, served.url, dark=dark, phone=dark)
        seen.open(f"#/{served.run.name}/run")
        expect(seen.page.locator(".state")).to_have_text(re.compile("Live|Quiet"), timeout=PATIENCE_MS)
        expect(seen.page.locator(".figure", has_text="Dead letters").locator(".value")).to_have_text("1")
        top = command(served, "top")
        assert seen.figure("Rollouts") == f"{top['rollouts']:,}"
        assert seen.figure("Batches waiting") == f"{top['waiting']:,}"
        assert seen.figure("Policy") == f"v{top['policy_version']}"
        assert seen.overflow <= 0
        assert seen.violations() == []
        assert seen.errors == []
        seen.page.context.close()


@pytest.mark.long
def test_the_ledger_of_a_run_that_has_ended_is_shown_to_whoever_asks_first(
    broker: str, run_name: str, tmp_path: Path, browser: Browser
) -> None:
    run = RealRun(KafkaConfig(bootstrap_servers=broker), run_name, tmp_path).prepare()
    try:
        group = run.start("group")
        run.send(rollout("x", member, reward=float(member)) for member in range(4))
        eventually(lambda: run.read("batches"), 120, "a batch")
        group.terminate()
        assert group.wait(120) == 0
        url = url_of(run, run.start("ui"))
        await_index(run, url)
        seen = visit(browser, url)
        seen.open(f"#/{run.name}/ledger")
        expect(seen.page.locator(".verdict")).to_contain_text("Balanced", timeout=PATIENCE_MS)
        seen.page.context.close()
    finally:
        run.stop()


@pytest.mark.long
def test_a_server_that_is_killed_and_started_again_is_found_by_the_open_page(
    served: ServedRun, browser: Browser
) -> None:
    seen = visit(browser, served.url)
    seen.open(f"#/{served.run.name}/run")
    state = seen.page.locator(".state")
    expect(state).to_have_text(re.compile("Live|Quiet"), timeout=PATIENCE_MS)
    before = seen.figure("Rollouts")
    served.kill()
    expect(state).to_have_text("Connection lost, retrying", timeout=PATIENCE_MS)
    assert seen.figure("Rollouts") == before
    served.serve_again()
    expect(state).to_have_text(re.compile("Live|Quiet"), timeout=PATIENCE_MS)
    expect(seen.page.locator(".banner.bad")).to_have_count(0, timeout=PATIENCE_MS)
    seen.page.context.close()
