"""Every view of the page in a browser, on a real run: what it shows, who can use it, what it refuses."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, expect

from rollstream.pipeline.control.steering import state
from tests.browser.chromium import PATIENCE_MS, Visit, visit
from tests.browser.served_run import HOSTILE, ServedRun, command, url_of

pytestmark = pytest.mark.long

VIEWS = {
    "run": "Curves",
    "rollouts": None,
    "groups": "Spread of reward",
    "drops": "Drops by reason",
    "weights": "Versions",
    "ledger": "Ledger",
    "sessions": "Sessions",
    "letters": "Dead letters",
    "compare": "Compare",
    "commands": "Commands",
}


def opened(browser: Browser, served: ServedRun, route: str, **how: bool) -> Visit:
    seen = visit(browser, served.url, **how)
    seen.open(f"#/{served.run.name}/{route}")
    return seen


@pytest.mark.parametrize("how", [{}, {"dark": True}, {"phone": True}], ids=["light", "dark", "phone"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_shows_its_answers_to_everybody(
    view: str, how: dict[str, bool], served: ServedRun, browser: Browser
) -> None:
    """Each view has no error, nothing refused by the policy and no serious finding of axe, and fits the window."""
    seen = opened(browser, served, view, **how)
    heading = VIEWS[view]
    if heading:
        expect(seen.page.get_by_role("heading", name=heading, exact=True, level=2)).to_be_visible()
    seen.settle()
    expect(seen.page.locator(".failure")).to_have_count(0)
    assert seen.overflow <= 0
    assert seen.violations() == []
    assert seen.errors == []
    seen.page.context.close()


def test_the_ledger_is_that_of_the_command_line_and_leads_to_rollouts(served: ServedRun, browser: Browser) -> None:
    book = command(served, "ledger")
    seen = opened(browser, served, "ledger")
    expect(seen.page.locator(".verdict")).to_contain_text("Balanced", timeout=PATIENCE_MS)
    place = seen.page.locator(".places tr", has=seen.page.get_by_text("dropped: zero variance"))
    expect(place.locator("td").first).to_contain_text(f"{book['dropped']['zero_variance']:,}")
    batched = seen.page.locator(".places tr", has=seen.page.locator("th", has_text=re.compile("batched$")))
    expect(batched.locator("td").first).to_contain_text(f"{book['batched']:,}")
    place.get_by_role("button").click()
    seen.page.get_by_role("link", name="List these rollouts").click()
    expect(seen.page.locator(".list-state")).to_contain_text("4 rollouts match")
    seen.page.context.close()


def test_a_link_restores_filters_and_what_is_open(served: ServedRun, browser: Browser) -> None:
    seen = opened(browser, served, "rollouts")
    expect(seen.page.locator(".list-state")).to_contain_text("rollouts match")
    seen.page.get_by_label("Fate").select_option("dropped")
    expect(seen.page.locator(".list-state")).to_contain_text("4 rollouts match")
    seen.page.locator(".list-body .list-row").first.click()
    title = seen.page.locator("#rollout-title")
    expect(title).to_be_visible()
    link, text = seen.page.url, title.inner_text()
    seen.page.context.close()
    again = visit(browser, served.url)
    again.open(link.removeprefix(served.url))
    expect(again.page.locator("#rollout-title")).to_have_text(text)
    expect(again.page.get_by_label("Fate")).to_have_value("dropped")
    expect(again.page.locator(".list-state")).to_contain_text("4 rollouts match")
    again.page.context.close()


def test_keys_move_open_and_close(served: ServedRun, browser: Browser) -> None:
    # Without a filter, the newest row may be the record that is no rollout, which has no details to open.
    seen = opened(browser, served, "rollouts?text=answer")
    expect(seen.page.locator(".list-body .list-row").first).to_be_visible()
    keys = seen.page.keyboard
    keys.press("j")
    keys.press("j")
    expect(seen.page.locator("#row-1")).to_have_attribute("aria-selected", "true")
    place = seen.page.locator("#row-1 .cell-place").inner_text()
    keys.press("Enter")
    expect(seen.page.locator("#rollout-title")).to_have_text(f"Rollout {place}")
    keys.press("k")
    above = seen.page.locator("#row-0 .cell-place").inner_text()
    expect(seen.page.locator("#rollout-title")).to_have_text(f"Rollout {above}")
    keys.press("Escape")
    expect(seen.page.locator("#rollout-title")).to_have_count(0)
    assert seen.errors == []
    seen.page.context.close()


def test_an_opened_rollout_has_its_texts_as_texts_and_its_numbers(served: ServedRun, browser: Browser) -> None:
    """Scripts in a text do not run: a dialog or a refused script would be among the errors."""
    seen = opened(browser, served, "rollouts?text=answer")
    expect(seen.page.locator(".list-body .list-row").first).to_be_visible()
    seen.page.locator(".list-body .list-row").first.click()
    expect(seen.page.locator(".turn-assistant .turn-text")).to_contain_text(HOSTILE)
    assert seen.page.locator("main img, main script").count() == 0
    expect(seen.page.locator(".member")).to_have_count(4)
    seen.page.get_by_text("Advantages under other estimators").click()
    estimators = seen.page.get_by_role("table", name="Advantages by estimator")
    for name in ("grpo", "rloo"):
        expect(estimators).to_contain_text(name)
    tokens = seen.page.locator(".strip")
    expect(tokens.locator(".token")).to_have_count(6)
    tokens.focus()
    for _ in range(4):
        seen.page.keyboard.press("ArrowRight")
    expect(seen.page.locator(".readout")).to_contain_text(re.compile('token 4 "[2-5]", id .*log-probability .1'))
    assert seen.violations() == []
    assert seen.errors == []
    seen.page.context.close()


def test_a_dead_letter_that_cannot_be_sent_stays_with_its_reason_after_a_question(
    served: ServedRun, browser: Browser
) -> None:
    seen = opened(browser, served, "letters")
    seen.page.get_by_role("checkbox").first.check()
    seen.page.get_by_role("button", name="Send 1 again").click()
    seen.page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(seen.page.get_by_role("dialog")).to_have_count(0)
    seen.page.get_by_role("button", name="Send 1 again").click()
    seen.page.get_by_role("dialog").get_by_role("button", name="Send again").click()
    expect(seen.page.get_by_role("status").filter(has_text="0 sent again. 0:0 stays:")).to_be_visible(
        timeout=PATIENCE_MS
    )
    assert seen.errors == []
    seen.page.context.close()


def test_a_command_of_the_page_is_recorded_after_a_question_and_shown(served: ServedRun, browser: Browser) -> None:
    seen = opened(browser, served, "commands")
    form = seen.page.get_by_role("form", name="Stop after a step")
    form.get_by_label("Step").fill("500")
    form.get_by_role("button").click()
    seen.page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    assert state(served.run.kafka, served.run.name)["stop_at_step"] is None
    form.get_by_role("button", name="Stop after a step…").click()
    seen.page.get_by_role("dialog").get_by_role("button", name="Stop after a step").click()
    expect(form.locator(".outcome")).to_have_text("Recorded.", timeout=PATIENCE_MS)
    assert state(served.run.kafka, served.run.name)["stop_at_step"] == 500
    expect(seen.page.locator("main")).to_contain_text("500", timeout=PATIENCE_MS)
    form.get_by_label("Step").fill("")
    form.get_by_role("button", name="Stop after a step…").click()
    seen.page.get_by_role("dialog").get_by_role("button", name="Stop after a step").click()
    expect(form.locator(".outcome")).to_have_text("Recorded.", timeout=PATIENCE_MS)
    assert state(served.run.kafka, served.run.name)["stop_at_step"] is None
    assert seen.errors == []


def test_a_lasting_change_is_made_after_a_question_and_listed(served: ServedRun, browser: Browser) -> None:
    seen = opened(browser, served, "commands")

    def give(name: str, **values: str) -> Locator:
        form = seen.page.get_by_role("form", name=name)
        for label, value in values.items():
            form.get_by_label(label).fill(value)
        form.get_by_role("button", name=f"{name}…").click()
        seen.page.get_by_role("dialog").get_by_role("button", name=name).click()
        return form

    form = give("Exclude rollouts", Offsets="0:0-0")
    expect(form.locator(".outcome")).to_contain_text("Recorded. 1 rollouts are excluded", timeout=PATIENCE_MS)
    expect(seen.page.locator("main")).to_contain_text("0:0-0", timeout=PATIENCE_MS)
    form = give("Roll back weights", Version="77", Reason="reward hacking")
    expect(form.locator(".failure")).to_contain_text("has no policy version 77", timeout=PATIENCE_MS)
    seen.page.context.close()


def test_an_archive_says_in_one_line_what_it_has_not(served: ServedRun, browser: Browser, tmp_path: Path) -> None:
    archive = str(tmp_path / "archive")
    command(served, "archive", archive)
    url = url_of(served.run, served.run.start("ui", "--archive", archive))
    for view in ("ledger", "sessions", "letters", "commands"):
        seen = visit(browser, url)
        seen.open(f"#/{served.run.name}/{view}")
        expect(seen.page.locator("main .empty")).to_contain_text(
            "This is an archive, which has none", timeout=PATIENCE_MS
        )
        expect(seen.page.locator(".failure")).to_have_count(0)
        assert seen.errors == []
        seen.page.context.close()
    seen = visit(browser, url)
    seen.open(f"#/{served.run.name}/groups")
    expect(seen.page.get_by_role("heading", name="Spread of reward", exact=True)).to_be_visible(timeout=PATIENCE_MS)
    seen.settle()
    expect(seen.page.locator(".failure")).to_have_count(0)
    assert seen.errors == []
    seen.page.context.close()
