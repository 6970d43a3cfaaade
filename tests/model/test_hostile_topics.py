"""Every command that reads a log, on a run with hostile records in every topic: none fails on them, output for programs
is JSON, and each command reports how many records it passed over and which was the first.
"""

import io
import json
import re
import sys
import time
import unicodedata
from collections.abc import Iterator
from typing import Any

import pytest

from rollstream.pipeline.command_line.cli import main
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import RecordError
from rollstream.topics.kafka.reader import read_to_end, record_at
from rollstream.topics.wire.catalogue import CATALOGUE, spec_of
from rollstream.topics.wire.codec import kind_of
from tests.support import hostile, planted
from tests.support.command_line import in_full
from tests.support.planted import Planted
from tests.support.runs import RealRun
from tests.support.settled import settled

RUN = "hostile"
COLOUR = re.compile(r"\x1b\[(0|1|2|3[23456]|1;3[23456]|48;[\d;]+)m")
"""Escapes that the tools themselves send."""


@pytest.fixture(scope="module")
def run(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planted]:
    """A run with planted facts that was grouped with hostile rollouts among them, and hostile records everywhere."""
    real = RealRun(KafkaConfig(bootstrap_servers=broker), RUN, tmp_path_factory.mktemp(RUN))
    try:
        actual = planted.plant(real)
        hostile.plant_rollouts(real)
        process = real.start("group")
        settled(real, in_flight=0)
        planted.end(process)
        hostile.plant(real)
        yield actual
    finally:
        real.stop()


def call(run: Planted, *words: str) -> int:
    where = () if "--run" in words else ("--run", run.run.name)
    data = ("--set", f"data_dir={run.run.directory}")
    return main([*in_full(words), *where, "-b", run.run.kafka.bootstrap_servers, *data])


def strict(text: str) -> Any:
    """Parse JSON by its standard, which has no NaN and no infinities."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def passed_over(err: str) -> dict[str, tuple[int, int]]:
    """How many records of each topic a command passed over, and the offset of the first, from its stderr."""
    matches = re.findall(
        rf"skipped ([\d,]+) of the records of {RUN}\.([a-z-]+), the first: {RUN}\.\2\[0\] offset (\d+): ", err
    )
    return {topic: (int(count.replace(",", "")), int(offset)) for count, topic, offset in matches}


@pytest.mark.parametrize("flags", ["", "--json", "--json --full", "-f %t:%p:%o:%k:%K:%s:%S:%T:%h:%h\\n"])
def test_cat_prints_every_record_of_every_topic(run: Planted, flags: str, capfd: pytest.CaptureFixture[str]) -> None:
    for topic in (spec.name for spec in CATALOGUE):
        assert call(run, "cat", topic, *flags.split()) == 0
        lines = capfd.readouterr().out.splitlines()
        there = list(read_to_end(run.run.kafka, run.run.topic(topic)))
        assert len([line for line in lines if line.startswith((f"{RUN}.", "{"))]) == len(there)
        if "--json" in flags:
            places = [(record["partition"], record["offset"]) for record in map(strict, lines)]
            assert sorted(places) == sorted((message.partition, message.offset) for message in there)


def test_a_header_that_is_no_utf8_is_named_and_no_process_ends_however_often_it_is_asked_for(run: Planted) -> None:
    messages = read_to_end(run.run.kafka, run.run.topic("dead-letters"))
    [bad] = [message for message in messages if message.key == b"header"]
    for _ in range(3):
        with pytest.raises(RecordError, match="the name of one is not UTF-8"):
            bad.header_pairs()
        assert bad.header("x") is None


VIEW = ("batch-index", "journal", "policies", "steps")
COMMANDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "top --once": ("top --once", ("metrics", "rollouts", *VIEW)),
    "lineage of a batch": ("lineage --batch 0-0", VIEW),
    "lineage of a rollout": ("lineage --rollout good0-0", VIEW),
    "lineage of a hostile rollout": ("lineage --rollout hostile0-0", VIEW),
    "lineage of a step": ("lineage --step 1", VIEW),
    "lineage of a hostile step": (f"lineage --step {hostile.HUGE}", VIEW),
    "lineage of a policy": ("lineage --policy 6", VIEW),
    "lineage of a hostile policy": (f"lineage --policy {hostile.HUGE}", VIEW),
    "show": ("show good0-0", VIEW),
    "show of a hostile rollout": ("show hostile0-0", VIEW),
    "show --full": ("show hostile3-0 --full", VIEW),
    "verify": ("verify", ("batch-index", "batches", "journal")),
    "replay --set": ("replay --set grouping.estimator=grpo", ("batches", "journal")),
    "dlq ls": ("dlq ls", ("dead-letters",)),
    "dlq redrive": ("dlq redrive --dry-run", ("dead-letters",)),
    "prune": ("prune --dry-run --keep-batches 0", ()),
    "exclude": ("exclude --env env --dry-run", ("batches", *VIEW)),
    "groups": ("groups --batches", ()),
    "ledger": ("ledger", ()),
    "ledger --by env": ("ledger --by env", ()),
    "runs": ("runs", ()),
    "topics describe": ("topics describe", ()),
}


@pytest.mark.parametrize("flags", [(), ("--json",)], ids=["text", "json"])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_answers_and_names_what_it_passed_over(
    run: Planted, name: str, flags: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    words, topics = COMMANDS[name]
    code = call(run, *words.split(), *flags)
    out, err = capfd.readouterr()
    assert code == (1 if name in ("dlq redrive", "ledger", "ledger --by env", "verify") else 0), err
    assert out
    if name == "verify":
        assert "the index names it, but the journal does not" in out
    assert "Traceback" not in err
    text = passed_over(err)
    assert text.keys() == set(topics)
    for topic, (count, first) in text.items():
        assert count >= 3
        # The record at this offset is of no kind that the topic should hold.
        message = record_at(run.run.kafka, run.run.topic(topic), 0, first)
        assert message is not None
        assert kind_of(message.value) not in spec_of(topic).values
    if flags:
        answer = strict(out)
        if name in ("verify", "replay --set", "exclude"):
            counted = {
                topic.removeprefix(f"{RUN}."): skipped["records"] for topic, skipped in answer["skipped"].items()
            }
            assert counted == {topic: count for topic, (count, _first) in text.items()}


def test_the_ledger_counts_what_it_could_not_read_in_its_answer(
    run: Planted, capfd: pytest.CaptureFixture[str]
) -> None:
    assert call(run, "ledger", "--json") == 1
    book = strict(capfd.readouterr().out)
    assert book["records_skipped"] >= 6 * 5, "in steps, journal, batches, batch-index, dead-letters, evals"
    assert len(book["unreadable"]) == 20
    assert call(run, "ledger") == 1
    assert "records could not be read and were ignored, the first:" in capfd.readouterr().out


def test_an_export_names_the_versions_that_cannot_be_had_and_ends(
    run: Planted, capfd: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    assert call(run, "weights", "export", "-o", str(run.run.directory / "exported"), "--json") == 2
    out, err = capfd.readouterr()
    assert time.monotonic() - began < 200, "not the ten minutes of a version that may yet come"
    assert out == ""
    assert f"skipped policy version {hostile.HUGE}: " in err
    assert f"skipped policy version {-hostile.HUGE}: " in err
    assert "has no policy version that can be exported" in err
    assert "Traceback" not in err


def test_a_report_is_written_although_the_newest_manifest_describes_no_model(
    run: Planted, capfd: pytest.CaptureFixture[str]
) -> None:
    page = run.run.directory / "report.html"
    assert call(run, "report", "-o", str(page)) == 0, capfd.readouterr().err
    assert capfd.readouterr().out.splitlines()[-1] == str(page)
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize(
    "words",
    [
        *("show hostile8-0", "show hostile11-0", "dlq ls", "dlq show", "top --once", "ledger --by env"),
        *("cat rollouts", "cat rollouts --json", "cat dead-letters -f %k:%h:%s\\n", "cat metrics"),
        *("lineage --rollout hostile8-0", f"lineage --step {hostile.HUGE}", f"lineage --policy {hostile.HUGE}"),
        "prune --dry-run --keep-batches 0",
    ],
)
def test_nothing_in_a_record_is_obeyed_by_a_terminal(run: Planted, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, errors = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", errors)
    assert call(run, *words.split()) in (0, 1)
    shown = terminal.getvalue()
    text = COLOUR.sub("", shown)
    assert text.strip()
    said = text + errors.getvalue()
    assert [c for c in said if c not in "\r\n\t" and unicodedata.category(c) in ("Cc", "Cf")] == []
    assert "\x1b[31m" not in shown
    if words.startswith(("show hostile", "lineage", "cat rollouts", "cat metrics")):
        assert r"\u001b[31m\u202e" in text, "it is spelt out"


class Terminal(io.StringIO):
    """Collects what a command sends to a terminal."""

    def isatty(self) -> bool:
        return True


def test_verify_of_the_newest_names_entries_that_the_journal_does_not_know(
    run: Planted, capfd: pytest.CaptureFixture[str]
) -> None:
    assert call(run, "verify", "--last", "2", "--json") == 1
    assert strict(capfd.readouterr().out)["differences"] == [
        f"batch {name}: the index names it, but the journal does not" for name in ("0-901", "0-951")
    ]


@pytest.mark.kafka  # times before 1970 are its own
def test_what_is_archived_is_asked_and_restored_record_by_record(
    run: Planted, capfd: pytest.CaptureFixture[str], run_name: str
) -> None:
    archive = str(run.run.directory / "archived")
    assert call(run, "archive", archive, "--json") == 0
    out, err = capfd.readouterr()
    rows = strict(out)["tables"]["log"]["rows"]
    text = passed_over(err)
    assert {"batches", "steps", "policies", "journal", "evals"} <= text.keys()
    assert text["steps"][1] == 1
    assert call(run, "archive", archive, "--check") == 0
    for table in ("log", "rollouts", "steps", "batches", "fates"):
        capfd.readouterr()
        assert call(run, "sql", f"select * from {table}", "--archive", archive, "--json") == 0
        assert strict(capfd.readouterr().out)
    assert call(run, "restore", archive, "--into", run_name, "--json") == 0
    assert strict(capfd.readouterr().out)["records"] == rows
    for topic in ("evals", "metrics"):
        before, after = (
            [(m.offset, m.key, m.value) for m in read_to_end(run.run.kafka, f"{name}.{topic}")]
            for name in (RUN, run_name)
        )
        assert before == after


def test_a_replay_into_another_run_writes_its_batches(
    run: Planted, capfd: pytest.CaptureFixture[str], run_name: str
) -> None:
    assert call(run, "replay", "--set", "grouping.estimator=grpo", "--into", run_name, "--json") == 0
    answer = strict(capfd.readouterr().out)
    assert (answer["into"], answer["replayed"]["rollouts"]) == (run_name, answer["recorded"]["rollouts"])
