"""A researcher's afternoon: from pip to a served checkpoint, with the commands, files and pages that a user has.

What is installed comes from an index, the broker and all roles are processes, and the page is looked at in a browser. A
table at the end says how long each step took; pictures of the page are left in the folder `pages`.
"""

import csv
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.chromium import PATIENCE_MS, Visit, visit
from tests.support.desk import Desk
from tests.support.paths import ROOT
from tests.support.waiting import eventually


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    """An empty folder, without the settings and caches of the tests."""
    own = ("ROLLSTREAM", "KAFKA", "PYTHONPATH", "JAX_", "JDK_")
    desk = Desk(tmp_path, {k: v for k, v in os.environ.items() if not k.startswith(own)} | {"JAX_PLATFORMS": "cpu"})
    try:
        yield desk
    finally:
        if (tmp_path / ".rollstream").exists():
            desk.run("rollstream", "broker", "stop")
        total = sum(seconds for _name, seconds in desk.seconds)
        print("\n   seconds  step", *(f"{s:10.1f}  {n}" for n, s in [*desk.seconds, ("together", total)]), sep="\n")


def looked_at(browser: Browser, url: str, route: str, pictures: Path) -> Visit:
    """Open a view by day, by night and on a phone, with a picture of each; return the first, which stays open."""
    first = None
    for name, how in {"light": {}, "dark": {"dark": True}, "phone": {"phone": True}}.items():
        seen = visit(browser, url, **how)
        seen.open(route)
        assert seen.overflow <= 0
        pictures.mkdir(exist_ok=True)
        view = re.sub(r"\W+", "-", route.partition("?")[0]).strip("-")
        seen.page.screenshot(path=pictures / f"{view}-{name}.png")
        assert seen.errors == []
        if first is None:
            first = seen
        else:
            seen.page.context.close()
    assert first is not None
    return first


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_an_afternoon_leads_from_pip_to_a_served_checkpoint_of_an_own_game(desk: Desk, browser: Browser) -> None:
    with desk.step("pip install into an empty environment"):
        install(desk)
    with desk.step("own game of two turns, env check"):
        for file in (ROOT / "tests" / "fixtures" / "afternoon").iterdir():
            shutil.copy(file, desk.home)
        checked = desk.rollstream("env check", "market.py:Market")
        assert '{"name":"sell","description":"Sell a good' in checked
        assert "failed" not in checked
    with desk.step("local broker, run, curve in terminal and page"):
        address = re.search(r"export (\w+)=(\S+)", desk.run("rollstream", "broker", "start", "--port", "0"))
        assert address
        desk.variables[address[1]] = address[2]
        with trained_until(desk, 8) as url:
            seen = looked_at(browser, url, "#/first/run", desk.home / "pages")
            expect(seen.page.locator(".state")).to_have_text(re.compile("Live|Quiet"), timeout=PATIENCE_MS)
            expect(seen.page.locator(".chart", has_text="Reward").first).to_be_visible(timeout=PATIENCE_MS)
            seen.page.context.close()
        assert "success" in desk.rollstream("top", "--once")
        assert json.loads(desk.rollstream("top", "--json"))["step"] >= 8
    with desk.step("a bad rollout as text"):
        read_a_bad_rollout(desk, browser)
    with desk.step("another estimator, replayed"):
        replayed = desk.rollstream("replay", "--set", "grouping.estimator=grpo")
        assert replayed.startswith("estimator: rloo_normalized -> grpo\n")
        assert "batches differ under the other configuration" in replayed
    with desk.step("kill -9 of the learner and of the run, resumed"):
        kill_and_resume(desk)
    with desk.step("second run with another learning rate, compared"):
        with trained_until(desk, 4, "--run", "second", "--set", "learner.optimizer.learning_rate=0.001"):
            pass
        compare(desk, browser)
    with desk.step("archive in DuckDB and datasets"):
        desk.rollstream("archive")
        read_the_archive(desk)
    with desk.step("checkpoint in transformers and served"):
        use_the_checkpoint(desk)


def install(desk: Desk) -> None:
    """Build a wheel of the checkout, and install it as README says, with the queries of the tutorial."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(desk.home / "dist")]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    [wheel] = (desk.home / "dist").glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", desk.home / "env"], check=True)
    desk.run("python", "-m", "pip", "install", "--quiet", f"{wheel}[learner,jre,sql]")
    assert desk.run("rollstream", "--version").startswith("rollstream ")


@contextmanager
def trained_until(desk: Desk, step: int, *words: str) -> Iterator[str]:
    """Train until a step, and then, on leaving, until Ctrl-C, which says where everything is. Yields the page's URL."""
    log = f"run-{len(desk.seconds)}.log"
    with desk.started(log, "run", "run.toml", "--set", "ui.port=0", *words) as run:
        url = desk.printed(log, r"page of run \S+: (http://\S+)", run)
        await_step(url, step)
        yield url
        run.send_signal(signal.SIGINT)
        assert run.wait(300) == 130
    assert "logs and checkpoints lie in data/runs/" in (desk.home / log).read_text()


def await_step(url: str, step: int) -> None:
    """Wait until the run that a page shows has made a step."""
    run = json.loads(fetched(f"{url}api/runs"))["runs"][0]["run"]
    overview = f"{url}api/runs/{run}/overview"
    eventually(lambda: json.loads(fetched(overview))["top"]["step"] >= step, 1500, f"step {step}")


def fetched(url: str, body: dict[str, Any] | None = None) -> bytes:
    """What a server answers to a request."""
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(
        urllib.request.Request(url, data, {"Content-Type": "application/json"}), timeout=60
    ) as answer:
        return bytes(answer.read())


@contextmanager
def page_of(desk: Desk, *runs: str) -> Iterator[str]:
    """Serve the page of these runs; yield its URL once it has read them."""
    with desk.started("ui.log", "ui", "--config", "run.toml", *(f"--run={run}" for run in runs)) as ui:
        url = desk.printed("ui.log", r"^page of runs? .*: (http://\S+)$", ui)

        def read() -> bool:
            overviews = [json.loads(fetched(f"{url}api/runs/{run}/overview")) for run in runs]
            return all(each["indexed"]["offset_done"] == each["indexed"]["offset_total"] > 0 for each in overviews)

        eventually(read, 300, "the index of the runs")
        yield url


def read_a_bad_rollout(desk: Desk, browser: Browser) -> None:
    """Find the worst rollout by SQL; the terminal and the page show it as text, with its unlikely words."""
    desk.rollstream("archive")
    query = 'select uid, partition, "offset" from rollouts order by reward, created_s desc limit 1'
    [worst] = csv.DictReader(io.StringIO(desk.rollstream("sql", "--csv", query)))
    shown = desk.rollstream("show", worst["uid"])
    assert re.search(r'^0 to \d+, not sampled: system⏎<tools>⏎\{"name":"sell",.*day·\d', shown, re.MULTILINE)
    assert "least likely: " in shown
    place = f"{worst['partition']}:{worst['offset']}"
    with page_of(desk, "first") as url:
        seen = looked_at(browser, url, f"#/first/rollouts?order=reward&open={place}", desk.home / "pages")
        expect(seen.page.locator("#rollout-title")).to_have_text(f"Rollout {place}")
        expect(seen.page.locator(".turn-user .turn-text").first).to_contain_text("day ")
        expect(seen.page.locator(".strip .token").nth(20)).to_be_visible()
        tokens = "".join(seen.page.locator(".strip .token").all_inner_texts())
        assert '"name":"sell","description":"Sell' in tokens
        seen.page.get_by_role("button", name=re.compile("tokens .* to")).nth(1).click()
        expect(seen.page.locator(".strip .token.active")).to_be_in_viewport()
        seen.page.context.close()


def kill_and_resume(desk: Desk) -> None:
    """Kill the learner, then the whole run, and start it again: no rollout is lost, and no batch differs."""
    reached = json.loads(desk.rollstream("top", "--json"))["step"]
    with desk.started("killed.log", "run", "run.toml", "--set", "ui.port=0") as run:
        await_step(desk.printed("killed.log", r"page of run \S+: (http://\S+)", run), reached + 2)
        ready = r'"role_ready", "role": "learn"'
        os.kill(int(desk.printed("killed.log", r'"role": "learn", "pid": (\d+)', run)), signal.SIGKILL)
        desk.printed("killed.log", rf"({ready}.*\n(?:.*\n)*.*{ready})", run)
        run.kill()
    with desk.started("resumed.log", "run", "run.toml") as run:
        desk.printed("resumed.log", r"(the learner has made its last step)", run)
        assert run.wait(300) == 0
    assert json.loads(desk.rollstream("top", "--json"))["step"] == 20
    assert "every record is in exactly one place" in desk.rollstream("ledger")
    assert ", 0 differences" in desk.rollstream("verify")


def compare(desk: Desk, browser: Browser) -> None:
    """The setting that differs comes first, in the terminal and on the page."""
    lines = [line.split() for line in desk.rollstream("runs", "first", "second").splitlines()]
    assert lines[:3] == [["setting", "first", "second"], ["learner.optimizer.learning_rate", "0.0005", "0.001"], []]
    assert [line[0] for line in lines[3:]] == ["run", "first", "second"]
    with page_of(desk, "first", "second") as url:
        seen = looked_at(browser, url, "#/first/compare", desk.home / "pages")
        rows = seen.page.get_by_role("table", name="Settings that differ").locator("tbody tr")
        expect(rows).to_have_count(1, timeout=PATIENCE_MS)
        expect(seen.page.locator("main h2")).to_have_text(["Compare", "Settings that differ", "Key numbers", "Curves"])
        expect(rows).to_contain_text(re.compile(r"learner.optimizer.learning_rate\s*0.0005\s*0.001"))
        seen.page.context.close()


def read_the_archive(desk: Desk) -> None:
    """What DuckDB and datasets read are the rollouts that the terminal counts."""
    rollouts = json.loads(desk.rollstream("top", "--json"))["rollouts"]
    table = desk.home / "data" / "archive" / "run=first" / "table=rollouts"
    files = sorted(map(str, table.rglob("*.parquet")))
    for package, count in {"duckdb": in_duckdb, "datasets": partial(in_datasets, cache=desk.home / "cache")}.items():
        if find_spec(package):
            assert count(files) == rollouts > 0
        else:
            print(f"skipped: {package} is not installed")


def in_duckdb(files: list[str]) -> int:
    import duckdb

    [[count]] = duckdb.sql(f"select count(distinct uid) from read_parquet({files!r})").fetchall()
    return int(count)


def in_datasets(files: list[str], cache: Path) -> int:
    import datasets

    return len(set(datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(cache))["uid"]))


def use_the_checkpoint(desk: Desk) -> None:
    """transformers and our server, with the same weights, continue a text with the same words."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    desk.rollstream("weights export", "-o", "model")
    tokenizer = AutoTokenizer.from_pretrained(desk.home / "model")
    # The server computes in float32 with parameters that are published in bfloat16.
    model = AutoModelForCausalLM.from_pretrained(desk.home / "model", dtype="float32")
    prompt = tokenizer("<tool_call>", return_tensors="pt", add_special_tokens=False)
    new = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    body = {"model": "policy", "prompt": "<tool_call>", "max_tokens": 12, "temperature": 0.0}
    with desk.started("serve.log", "role", "infer", "--config", "run.toml", "--set", "inference.port=0") as server:
        url = desk.printed("serve.log", r"(http://127\.0\.0\.1:\d+)", server)
        answer: dict[str, Any] = eventually(lambda: asked(f"{url}/v1/completions", body), 300, "an answer")  # type: ignore[assignment]
    assert answer["choices"][0]["text"] == tokenizer.decode(new, skip_special_tokens=True)


def asked(url: str, body: dict[str, Any]) -> dict[str, Any] | None:
    """Answer of the server; None while it has no version yet."""
    try:
        return dict(json.loads(fetched(url, body)))
    except urllib.error.HTTPError as error:
        if error.code != 503:
            raise
        return None
