"""The page of a real `rollstream run`: it is open while the overseer is killed and started again, and steers it."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from rollstream.infra.broker.ports import free_port
from rollstream.pipeline.audit.ledger import ledger
from rollstream.pipeline.control.steering import state
from tests.browser.chromium import PATIENCE_MS, Visit, visit
from tests.support.steered_run import SteeredRun
from tests.support.waiting import eventually

pytestmark = pytest.mark.long

_SLOW_MS = 10 * PATIENCE_MS
_MOVES = re.compile("Live|Quiet")


@pytest.fixture
def overseen(broker: str, run_name: str, tmp_path: Path) -> Iterator[SteeredRun]:
    run = SteeredRun(broker, run_name, tmp_path)
    # Without an evaluator a run refuses evaluations.
    run.values |= {"ui.port": free_port("127.0.0.1"), "evaluation.every_versions": 1000}
    yield run
    run.close()


def command(seen: Visit, name: str) -> None:
    """Give a command that needs no values, and answer the question that it asks."""
    form = seen.page.get_by_role("form", name=name)
    form.get_by_role("button", name=f"{name}…").click()
    seen.page.get_by_role("dialog").get_by_role("button", name=name).click()
    expect(form.locator(".outcome")).to_have_text("Recorded.", timeout=_SLOW_MS)


def test_an_overseer_is_killed_started_again_and_drained_while_its_page_is_open(
    overseen: SteeredRun, browser: Browser
) -> None:
    run = overseen
    run.start()
    run.await_steps(1)
    seen = visit(browser, f"http://127.0.0.1:{run.values['ui.port']}/")
    seen.open(f"#/{run.name}/run")
    shown = seen.page.locator(".state")
    expect(shown).to_have_text(_MOVES, timeout=_SLOW_MS)
    rollouts = seen.figure("Rollouts")
    run.kill()
    expect(shown).to_have_text("Connection lost, retrying", timeout=_SLOW_MS)
    assert int(seen.figure("Rollouts").replace(",", "")) >= int(rollouts.replace(",", "")), "what it has stays"
    run.start()
    expect(shown).to_have_text(_MOVES, timeout=_SLOW_MS)
    run.await_steps(1)
    reached = run.top()["step"]
    eventually(lambda: int(seen.figure("Step").replace(",", "")) >= reached, 120, "the page goes on")
    # A page server that starts beside a busy run answers so until its index is open, and the page asks again.
    assert [error for error in seen.errors if "503 (Service Unavailable)" not in error] == []
    seen.errors.clear()

    seen.open(f"#/{run.name}/commands")
    command(seen, "Evaluate now")
    command(seen, "Drain")
    assert state(run.kafka, run.name)["drain"] == "wanted"
    assert run.process.wait(900) == 0, run.output
    assert "with nothing in flight" in run.output
    books = ledger(run.kafka, run.name)
    assert (books.problems, books.in_flight) == ([], 0)
    assert seen.errors == []
    seen.page.context.close()
