"""The page in a browser, on two runs of an archive, which needs no broker."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, expect

from rollstream.pipeline.config import RunConfig, load, to_toml
from rollstream.pipeline.ui_config import UiConfig
from tests.browser.chromium import PATIENCE_MS, visit
from tests.support.archived_run import archive_run, evaluated, step_of
from tests.support.page import page_server

RUNS = ("first", "second")


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    for run in RUNS:
        archive_run(tmp_path / "archive", 4, run=run)
    return tmp_path / "archive"


@pytest.fixture
def address(archive: Path, tmp_path: Path) -> Iterator[str]:
    configs = [RunConfig(run=run, data_dir=tmp_path) for run in RUNS]
    with page_server(UiConfig(port=0), *configs, archive=str(archive)) as server:
        yield server.url


@pytest.mark.long
def test_any_number_of_open_pages_follow_a_run(address: str, archive: Path, browser: Browser) -> None:
    """A browser opens six connections to a server, and an event stream occupies one as long as a page is open."""
    pages = [visit(browser, address).page]
    pages += [pages[0].context.new_page() for _ in range(7)]
    for page in pages:
        page.goto(f"{address}#/first/run")
        expect(page.locator("nav .nav-note")).to_have_text("32", timeout=PATIENCE_MS)
        expect(page.locator(".state")).to_have_text("Quiet", timeout=PATIENCE_MS)
    archive_run(archive, 5, run="first")
    for page in pages:
        expect(page.locator("nav .nav-note")).to_have_text("40", timeout=PATIENCE_MS)
    pages[0].close()
    pages[1].reload()
    expect(pages[1].locator(".state")).to_have_text("Quiet", timeout=PATIENCE_MS)
    pages[1].context.close()


@pytest.mark.long
def test_pages_of_any_number_of_runs_are_open_together(tmp_path: Path, browser: Browser) -> None:
    """All runs share one event stream, and a run that the server does not have ends it for no other."""
    runs = [f"run-{number}" for number in range(7)]
    for run in runs:
        archive_run(tmp_path / "archive", 4, run=run)
    configs = [RunConfig(run=run, data_dir=tmp_path) for run in runs]
    with page_server(UiConfig(port=0), *configs, archive=str(tmp_path / "archive")) as server:
        absent = visit(browser, server.url).page
        absent.goto(f"{server.url}#/absent/run")
        pages = [absent.context.new_page() for _ in runs]
        for run, page in zip(runs, pages, strict=True):
            page.goto(f"{server.url}#/{run}/run")
            expect(page.locator("nav .nav-note")).to_have_text("32", timeout=PATIENCE_MS)
            expect(page.locator(".state")).to_have_text("Quiet", timeout=PATIENCE_MS)
        for run in runs:
            archive_run(tmp_path / "archive", 5, run=run)
        for page in pages:
            expect(page.locator("nav .nav-note")).to_have_text("40", timeout=PATIENCE_MS)
            expect(page.locator(".state")).to_have_text("Quiet", timeout=PATIENCE_MS)
        absent.context.close()


def test_the_page_of_a_run_that_the_server_does_not_have_says_so_and_leads_to_those_it_has(
    address: str, browser: Browser
) -> None:
    page = visit(browser, address).page
    page.goto(f"{address}#/absent/ledger")
    expect(page.locator("main")).to_contain_text("This server has no run absent. It has:", timeout=PATIENCE_MS)
    page.goto(f"{address}#/absent/run")
    expect(page.locator(".state")).to_have_text("Refused by the server", timeout=PATIENCE_MS)
    expect(page.locator("main .failure")).to_contain_text("this server has no such run")
    page.goto(f"{address}#/absent/ledger")
    page.locator("main").get_by_role("link", name=RUNS[0]).click()
    expect(page.locator("main")).not_to_contain_text("has no run", timeout=PATIENCE_MS)
    assert page.url.endswith(f"#/{RUNS[0]}/run")
    page.context.close()


def test_runs_are_compared_by_their_settings_and_curve_by_curve(
    archive: Path, browser: Browser, tmp_path: Path
) -> None:
    """A chart draws a part of many curves: those of all rollouts first, and each of every run."""
    runs = (*RUNS, "third")
    for run, rate in zip(runs, ("0.004", "0.008", "0.008"), strict=True):
        config = load(flags=[f"run={run}", f"data_dir={tmp_path}", f"learner.optimizer.learning_rate={rate}", "seed=3"])
        config.run_dir.mkdir(parents=True, exist_ok=True)
        (config.run_dir / "run.toml").write_text(to_toml(config))
    rewards = {f"reward/e{number:02}": number / 20 for number in range(12)}
    for run in runs:
        archive_run(archive, 4, [replace(step_of(4), metrics=rewards)], run=run)
    configs = [RunConfig(run=run, data_dir=tmp_path) for run in runs]
    with page_server(UiConfig(port=0), *configs, archive=str(archive)) as server:
        seen = visit(browser, server.url)
        seen.open("#/first/compare")
        settings = seen.page.get_by_role("region", name="Table: Settings that differ").locator("tbody tr")
        expect(settings).to_have_text(["learner.optimizer.learning_rate0.0040.008"], timeout=PATIENCE_MS)
        chart = seen.page.locator(".chart", has=seen.page.get_by_text("Reward", exact=True))
        labels = chart.locator(".legend-label")
        drawn = [f"{label} · {run}" for label in ("produced", "e00", "e01", "e02", "e03") for run in RUNS]
        expect(labels).to_have_text(drawn, timeout=PATIENCE_MS)
        expect(chart.locator(".chart-at")).to_have_text("9 more not drawn")
        seen.page.get_by_role("button", name="All curves of each chart").click()
        expect(labels).to_have_count(2 * 14)
        evals = evaluated(2, "sums", [2, 0], samples=2, prompts=3)
        archive_run(archive, 4, [step_of(n) for n in range(4, 8)], run="second", evals=evals)
        loss = seen.page.locator(".chart", has=seen.page.get_by_text("Loss", exact=True))
        values = loss.locator(".legend-value")
        expect(values).to_have_text(["0.25", "0.125"], timeout=PATIENCE_MS)
        seen.page.get_by_label("Add").select_option("third")
        expect(values).to_have_text(["0.25", "0.125", "0.25"], timeout=PATIENCE_MS)
        expect(settings).to_have_text(["learner.optimizer.learning_rate0.0040.0080.008"], timeout=PATIENCE_MS)
        seen.page.get_by_role("button", name="Remove second").click()
        expect(values).to_have_text(["0.25", "0.25"], timeout=PATIENCE_MS)
        seen.open("#/second/run")
        evaluations = seen.page.get_by_role("region", name="Table: Evaluations, newest first").locator("tbody tr")
        figures = "periodic4 of 6, 2 a prompt0.5 (0 to 1)50 % (0 % to 100 %)50 % (0 % to 100 %)"
        expect(evaluations).to_have_text([f"v22sums {figures}", f"v22suite both {figures}"], timeout=PATIENCE_MS)
        assert seen.errors == []
        seen.page.context.close()


def test_a_curve_is_smoothed_and_its_numbers_are_saved_as_they_are(
    address: str, archive: Path, browser: Browser
) -> None:
    """Of losses of 1, 1/2, 1/3 and 1/4, weighted by 0.216, 0.36, 0.6 and 1, the mean is 0.389."""
    seen = visit(browser, address)
    seen.open("#/first/run?smooth=0.6")
    loss = seen.page.locator(".chart", has=seen.page.get_by_text("Loss", exact=True))
    expect(loss.locator(".legend-value")).to_have_text(["0.389"], timeout=PATIENCE_MS)
    loss.get_by_text("Table").click()
    with seen.page.expect_download() as saved:
        loss.get_by_role("button", name="Download as CSV").click()
    assert saved.value.suggested_filename == "Loss.csv"
    assert Path(saved.value.path()).read_text() == "step,loss\n0,1\n1,0.5\n2,0.3333333333333333\n3,0.25\n"
    assert seen.errors == []
    seen.page.context.close()


@pytest.mark.long
def test_a_chart_that_is_zoomed_stays_so_when_steps_are_added(address: str, archive: Path, browser: Browser) -> None:
    archive_run(archive, 20, run="first")
    seen = visit(browser, address)
    seen.open("#/first/run")
    chart = seen.page.locator(".chart", has=seen.page.get_by_text("Loss", exact=True))
    newest = chart.locator(".legend-value")
    expect(newest).to_have_text("0.05", timeout=PATIENCE_MS)
    plot = chart.locator(".u-over")

    def first_step() -> str:
        plot.hover(position={"x": 1, "y": 20})
        return chart.locator(".chart-at").inner_text()

    assert first_step() == "step 0"
    width = plot.evaluate("each => each.clientWidth")
    plot.drag_to(plot, source_position={"x": width / 2, "y": 20}, target_position={"x": width - 2, "y": 20})
    zoomed = first_step()
    assert zoomed in ("step 9", "step 10")
    seen.page.mouse.move(0, 0)
    archive_run(archive, 25, run="first")
    expect(newest).to_have_text("0.04", timeout=PATIENCE_MS)
    assert first_step() == zoomed
    assert seen.errors == []
    seen.page.context.close()


def test_a_page_without_the_token_that_the_server_now_requires_says_so(
    archive: Path, tmp_path: Path, browser: Browser
) -> None:
    config, secret = RunConfig(run="first", data_dir=tmp_path), tmp_path / "token"
    secret.write_text("the token of the second server.")
    with ExitStack() as stack:
        url = stack.enter_context(page_server(UiConfig(port=0), config, archive=str(archive))).url
        page = visit(browser, url).page
        page.goto(f"{url}#/first/run")
        expect(page.locator(".state")).to_have_text("Quiet", timeout=PATIENCE_MS)
        stack.close()
        second = UiConfig(port=urlsplit(url).port or 0, token=f"file:{secret}")
        stack.enter_context(page_server(second, config, archive=str(archive)))
        expect(page.locator(".state")).to_have_text("Refused by the server", timeout=PATIENCE_MS)
        expect(page.locator("main > .failure")).to_contain_text("token")
        expect(page.locator("nav .nav-note")).to_have_text("32")
        page.context.close()
