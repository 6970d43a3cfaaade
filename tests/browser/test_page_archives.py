"""The page in a browser, on two runs of an archive, which needs no broker."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.ui.config import UiConfig
from tests.browser.chromium import PATIENCE_MS, visit
from tests.support.archived_run import archive_run
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


def test_any_number_of_open_pages_follow_a_run(address: str, archive: Path, browser: Browser) -> None:
    """A browser opens six connections to a server, and an event stream occupies one as long as its page is open."""
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
