"""A Chromium for tests, installed by apt if there is none, and the errors that its pages made.

No test is skipped if no browser can be had: the test that asked for it fails with the remedy.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import axe_playwright_python
import pytest
from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
REMEDY = (
    "install Chromium (Debian: apt-get install chromium), or deselect these tests by name: "
    'make test ARGS="--ignore=tests/browser"'
)
DESK = {"width": 1366, "height": 860}
PHONE = {"width": 360, "height": 740}
PATIENCE_MS = 60_000
_AXE = "axe.min.js"
_AWAY = re.compile("ERR_CONNECTION_REFUSED")
"""Said by the browser while the server is away, which the page shows itself."""


def executable() -> str:
    """Path of a Chromium."""
    path = _found()
    if path is None and shutil.which("apt-get") and os.geteuid() == 0:
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        install = ["apt-get", "install", "--quiet", "--yes", "--no-install-recommends", "chromium", "fonts-dejavu-core"]
        for command in (install, ["apt-get", "update", "--quiet"], install):
            if _found() is None:
                subprocess.run(command, capture_output=True, timeout=900, check=False, env=environment)
        path = _found()
    if path is None:
        pytest.fail(f"there is no Chromium: {REMEDY}", pytrace=False)
    return path


def _found() -> str | None:
    return next((path for path in map(shutil.which, NAMES) if path), None)


@contextmanager
def started() -> Iterator[Browser]:
    """A browser without a window, ended on leaving."""
    # Chromium's sandbox refuses root, which tests in a container are.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable(), args=arguments, timeout=PATIENCE_MS)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Visit:
    """A page that a test looks at, and the errors it made: exceptions, errors of the console, refused content."""

    page: Page
    url: str
    errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._console)
        self.page.on("dialog", lambda dialog: self.errors.append(f"a dialog opened: {dialog.message}"))

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning") and not _AWAY.search(message.text):
            self.errors.append(f"{message.text} {message.location.get('url', '')}")

    def open(self, route: str) -> None:
        """Load the page anew at a route, and wait until nothing is being read."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.url}{route}")
        self.settle()

    def settle(self) -> None:
        """Wait until every part that reads has its answer."""
        self.page.locator("main h1").wait_for(state="attached")
        self.page.wait_for_load_state("load")
        self.page.locator(".loading").first.wait_for(state="detached")

    def figure(self, label: str) -> str:
        """The key number with a label."""
        return self.page.locator(".figure", has=self.page.get_by_text(label, exact=True)).locator(".value").inner_text()

    def exact_figure(self, label: str) -> int:
        """The key number with a label, with all its digits."""
        figure = self.page.locator(".figure", has=self.page.get_by_text(label, exact=True)).locator(".value")
        return int((figure.get_attribute("title") or "").replace(",", ""))

    @property
    def overflow(self) -> int:
        """Pixels by which the page is wider than its window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - innerWidth"))

    def violations(self) -> list[str]:
        """Serious and critical findings of axe."""
        [script] = Path(axe_playwright_python.__file__).parent.rglob(_AXE)
        # A page under this policy takes no scripts but its own, so the script comes as an expression of the debugger.
        self.page.evaluate(script.read_text())
        actual = self.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        return [
            f"{each['impact']} {each['id']}: {each['nodes'][0]['html'][:200]}"
            for each in actual["violations"]
            if each["impact"] in ("serious", "critical")
        ]


def visit(browser: Browser, url: str, *, dark: bool = False, phone: bool = False) -> Visit:
    """A page of its own in a context of its own: nothing is stored from earlier visits."""
    context = browser.new_context(
        viewport=PHONE if phone else DESK,  # type: ignore[arg-type]
        color_scheme="dark" if dark else "light",
        reduced_motion="reduce",
    )
    return Visit(context.new_page(), url)
