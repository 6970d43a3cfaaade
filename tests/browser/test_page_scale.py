"""The page of a run of very many rollouts in a browser: it says what commands say; how long it takes is reported."""

import json
import time
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import psutil
import pytest
from playwright.sync_api import Browser, expect

from rollstream.topics.config import KafkaConfig
from tests.browser.chromium import PATIENCE_MS, Visit, visit
from tests.browser.served_run import ServedRun, command, url_of
from tests.support.index_logs import GROUP
from tests.support.many_rollouts import PARTITIONS, ManyRollouts
from tests.support.waiting import eventually

# The first test of a run also makes it.
pytestmark = pytest.mark.timeout(2 * 3600)

_PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
_PAINT_AIM_MS, _FILTER_AIM_MS = 1000, 300
_TEXTS = ("the answer", "case 00000000123", "text that is nowhere")


class ServedMany:
    """The run, the process that serves its page once it has indexed all, and times to report."""

    def __init__(self, many: ManyRollouts) -> None:
        self.many, self.times = many, dict[str, str]()
        self.steps = 0

    def serve(self) -> None:
        began = time.monotonic()
        process = self.many.run.start("ui")
        self.served = ServedRun(self.many.run, process, url_of(self.many.run, process))
        # Each look counts all rollouts, so it takes time from the process that indexes them.
        pause_s = max(0.5, self.many.rollouts / 200_000)
        eventually(self._indexed, 3600, "all rollouts are indexed", every_s=pause_s)
        self.many.seconds["indexed"] = time.monotonic() - began
        processes = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
        self.many.seconds["indexed, of processors"] = sum(sum(each.cpu_times()[:2]) for each in processes)

    def _indexed(self) -> bool:
        assert self.served.process.poll() is None, self.many.run.log_of(self.served.process)
        fates = self.asked("facets")["fates"]
        return bool(fates.get("trained") == self.many.batched and self.listed()["matching"] >= self.many.rollouts)

    def asked(self, path: str, **query: object) -> dict[str, Any]:
        """An answer of the server."""
        address = f"{self.served.url}api/runs/{self.many.run.name}/{path}?{urlencode(query)}"
        with urllib.request.urlopen(address, timeout=300) as answer:
            return dict(json.loads(answer.read()))

    def listed(self, **wanted: object) -> dict[str, Any]:
        """A page of rollouts, of one row by default."""
        return self.asked("rollouts", **{"limit": 1, **wanted})

    def route(self, view: str) -> str:
        return f"#/{self.many.run.name}/{view}"


@pytest.fixture(
    scope="module", params=[10_000, pytest.param(1_000_000, marks=pytest.mark.long)], ids=["thousands", "a million"]
)
def made(request: pytest.FixtureRequest, broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedMany]:
    name = f"made-{request.param}"
    many = ManyRollouts(KafkaConfig(bootstrap_servers=broker), name, tmp_path_factory.mktemp(name), request.param)
    made = ServedMany(many)
    try:
        many.write()
        made.steps = many.train()
        made.serve()
        yield made
    finally:
        many.run.stop()


@pytest.fixture(autouse=True)
def reported(made: ServedMany, capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Print what was measured, with the aims, if the run has very many rollouts."""
    made.times.clear()
    yield
    if made.many.rollouts > 100_000:
        facts = [f"{made.many.rollouts:,} rollouts, {made.steps} steps"]
        facts += [f"{seconds:8.1f} s   {name}" for name, seconds in made.many.seconds.items()]
        facts += [f"{figure}  {name}" for name, figure in made.times.items()]
        with capsys.disabled():
            print("", *facts, sep="\n  ")


def timed(made: ServedMany, name: str, ms: float, aim: float = _FILTER_AIM_MS) -> None:
    made.times[name] = f"{ms:8.0f} ms (aim {aim})"


def filtered_ms(seen: Visit, label: str, choice: str) -> float:
    """Time from the choice of a filter to the first row of its answer."""
    state, row = seen.page.locator(".list-state"), seen.page.locator(".list-body .list-row .cell-place").first
    with seen.page.expect_response(lambda answer: "/rollouts?" in answer.url):
        began = time.perf_counter()
        seen.page.get_by_label(label).select_option(choice)
    expect(state).to_contain_text("match", timeout=PATIENCE_MS)
    row.wait_for()
    return 1000 * (time.perf_counter() - began)


@pytest.mark.long
def test_numbers_are_those_of_the_command_line(made: ServedMany, browser: Browser) -> None:
    many = made.many
    top, book = command(made.served, "top"), command(made.served, "ledger")
    lost = PARTITIONS * many.chunks
    assert (top["rollouts"], top["step"], top["dead_lettered"]) == (many.rollouts, made.steps, lost)
    assert (book["batched"], book["trained"], book["dropped"]) == (
        many.batched,
        many.batched,
        {"zero_variance": many.rollouts - many.batched},
    )
    fates = made.asked("facets")["fates"]
    assert fates == {
        "trained": book["trained"],
        "dropped": book["dropped"]["zero_variance"],
        "control": fates["control"],
        "dead_lettered": lost,
    }
    seen = visit(browser, made.served.url)
    seen.open(made.route("run"))
    for label, number in (("Rollouts", top["rollouts"]), ("Dead letters", lost), ("Batches waiting", top["waiting"])):
        assert seen.exact_figure(label) == number
    seen.open(made.route("ledger"))
    expect(seen.page.locator(".verdict")).to_contain_text("Balanced", timeout=10 * PATIENCE_MS)
    for words, number in (("dropped: zero variance", book["dropped"]["zero_variance"]), ("batched", book["batched"])):
        place = seen.page.locator(".places tr", has=seen.page.get_by_text(words)).first
        expect(place.locator("td").first).to_contain_text(f"{number:,}")
    assert seen.errors == []
    seen.page.context.close()


@pytest.mark.long
def test_views_are_painted_lists_filtered_and_texts_found(made: ServedMany, browser: Browser) -> None:
    for view in ("run", "rollouts", "groups", "drops", "ledger"):
        seen = visit(browser, made.served.url)
        seen.open(made.route(view))
        timed(made, f"first paint, {view}", seen.page.evaluate(_PAINT), _PAINT_AIM_MS)
        assert seen.errors == []
        seen.page.context.close()
    seen = visit(browser, made.served.url)
    seen.open(made.route("rollouts"))
    expect(seen.page.locator(".list-state")).to_contain_text("rollouts match", timeout=PATIENCE_MS)
    for label, choice in (("Environment", "env1"), ("Fate", "dropped"), ("Worker", "worker-2"), ("Order", "reward")):
        timed(made, f"filter, {label}", filtered_ms(seen, label, choice))
    first = made.listed(environment="env1", fate="dropped", worker="worker-2", order="reward")["rows"][0]
    expect(seen.page.locator(".list-body .list-row").first).to_contain_text(first["place"])
    seen.page.get_by_role("button", name="Clear all").click()
    for text in _TEXTS:
        with seen.page.expect_response(lambda answer: "text=" in answer.url) as answered:
            seen.page.get_by_label("Text").fill(text)
        answer = answered.value
        assert answer.json()["matching"] == made.listed(text=text)["matching"]
        answer.finished()
        timed(made, f"answer to text {text!r}", answer.request.timing["responseEnd"])
    assert made.listed(text="case 00000000123")["rows"][0]["uid"] == f"u{123 // GROUP:09d}-{123 % GROUP}"
    assert seen.errors == []
    seen.page.context.close()


@pytest.mark.long
def test_the_list_is_scrolled_to_any_of_its_rows(made: ServedMany, browser: Browser) -> None:
    seen = visit(browser, made.served.url)
    seen.open(made.route("rollouts"))
    body = seen.page.locator(".list-body .list-row .cell-place")
    expect(body.first).to_be_visible()
    total = made.listed()["matching"]
    expect(seen.page.locator(".long-list")).to_have_attribute("aria-rowcount", str(total + 1))
    oldest = made.listed(order="oldest")["rows"][0]["place"]
    began = time.perf_counter()
    seen.page.evaluate("const list = document.querySelector('.long-list'); list.scrollTop = list.scrollHeight")
    expect(seen.page.locator(f"#row-{total - 1}")).to_contain_text(oldest, timeout=PATIENCE_MS)
    timed(made, "to the last row", 1000 * (time.perf_counter() - began))
    seen.page.evaluate("const list = document.querySelector('.long-list'); list.scrollTop = list.scrollHeight / 3")
    # Until the new rows are fetched, the previous ones are shown.
    seen.page.wait_for_function(
        "total => (row => row > total / 4 && row < total / 2)"
        "(Number(document.querySelectorAll('.list-body .list-row')[20]?.id.slice('row-'.length)))",
        arg=total,
        timeout=PATIENCE_MS,
    )
    index = int(seen.page.locator(".list-body .list-row").nth(20).get_attribute("id").removeprefix("row-"))  # type: ignore[union-attr]
    assert total / 4 < index < total / 2
    after = made.listed()["next"]
    expect(body.nth(20)).to_have_text(made.listed(after=after, skip=index - 1)["rows"][0]["place"])
    # Keys go on from there, row by row.
    seen.page.locator(f"#row-{index}").click()
    seen.page.keyboard.press("j")
    expect(seen.page.locator(f"#row-{index + 1}")).to_have_attribute("aria-selected", "true")
    assert seen.errors == []
    seen.page.context.close()
