"""The theme of the page in a browser: that of the system until one is chosen, and then the chosen one."""

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.chromium import PATIENCE_MS, visit
from tests.support.paths import ROOT

GROUND = {"light": "rgb(246, 246, 244)", "dark": "rgb(19, 22, 25)"}


@pytest.fixture
def address() -> Iterator[str]:
    """The files of the page without a run behind them."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(ROOT / "pipeline" / "ui" / "page"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


def expect_theme(page: Page, theme: str) -> None:
    root = page.locator("html")
    expect(root).to_have_attribute("data-theme", theme, timeout=PATIENCE_MS)
    expect(root).to_have_css("background-color", GROUND[theme])
    expect(root).to_have_css("color-scheme", theme)


def test_the_theme_is_that_of_the_system_until_one_is_chosen(address: str, browser: Browser) -> None:
    for first, other in (("light", "dark"), ("dark", "light")):
        page = visit(browser, address, dark=first == "dark").page
        page.goto(address)
        expect_theme(page, first)
        page.emulate_media(color_scheme=other)  # type: ignore[arg-type]
        expect_theme(page, other)
        page.get_by_role("button", name=f"Change to the {first} theme").click()
        expect_theme(page, first)
        page.emulate_media(color_scheme=first)  # type: ignore[arg-type]
        page.emulate_media(color_scheme=other)  # type: ignore[arg-type]
        expect_theme(page, first)
        page.reload()
        expect_theme(page, first)
        page.context.close()
