"""A demo passes when it learned, the ledger balances and nothing differs; the report says so to people and programs."""

import dataclasses
import json
import sys
from typing import Any

import pytest

from rollstream.pipeline.audit.texts import ledger_text, verification_text
from rollstream.pipeline.command_line.text_tables import bytes_text, table
from rollstream.pipeline.index.lineage import LineageNode
from rollstream.pipeline.launch.demo_engine import EngineUse
from rollstream.pipeline.launch.demo_faults import Fault
from rollstream.pipeline.launch.demo_report import DemoReport, HeldOutScore
from rollstream.pipeline.tools.replay import ReplayComparison

BOOK: dict[str, Any] = {
    "balanced": True,
    "produced": 110,
    "rollouts": 100,
    "batched": 80,
    "trained": 64,
    "skipped": 16,
    "dropped": {"zero_variance": 20},
    "dead_lettered": 0,
    "control": 10,
    "in_flight": 0,
    "unread": 0,
    "selection": {},
    "problems": [],
}
REPORT = DemoReport(
    run="r",
    task="dsort3",
    seed=0,
    outcome="it learned",
    reward_first=0.1,
    reward_last=0.95,
    success_first=0.0,
    success_last=0.9,
    heldout_first=HeldOutScore(version=0, prompts=200, reward=0.1, success=0.0),
    heldout_last=HeldOutScore(version=9, prompts=200, reward=0.9, success=0.85),
    rollouts=100,
    batches=5,
    steps=9,
    seconds=100.0,
    training_seconds=80.0,
    warm_start_steps=60,
    topic_bytes={"rollouts": 1_234_567, "metrics": 0},
    ledger=BOOK,
    verify={"batches": 5, "drops": 20, "mismatches": 0, "differences": []},
    faults=(Fault(role="group-1", pid=7, step=84, at_s=31.0, back_s=2.5, back="its partitions"),),
    lineage=LineageNode("rollout", "u-0", {"with": [f"u-{n}" for n in range(100)]}, [LineageNode("batch", "0-7")]),
    replay=ReplayComparison(changed={"estimator": [["rloo"], "grpo"]}),
    kept=False,
    places={"logs": "/somewhere/logs"},
    next=("rollstream demo --keep",),
)


def test_a_report_passes_when_every_promise_held() -> None:
    assert REPORT.passed
    assert REPORT.failures == ()
    assert "PASSED" in REPORT.as_text()
    assert "what to try next:\n    rollstream demo --keep" in REPORT.as_text()


def test_a_report_of_several_accuracies_says_which_one_counts_and_why() -> None:
    text = REPORT.as_text()
    [row] = [line for line in text.splitlines() if "(decides)" in line]
    assert row.split()[-2:] == ["0.000", "0.900"]
    assert "PASSED depends on success, rollouts produced: it rose by 0.900, and 0.5 is needed." in text
    assert "its standard error is at most 0.016" in text
    assert "Over 200 held-out answers the standard error is at most 0.035" in text
    learned_by_heart = dataclasses.replace(REPORT, heldout_last=dataclasses.replace(REPORT.heldout_last, success=0.0))
    assert learned_by_heart.passed, "the one that is named decides, and no other"
    assert not dataclasses.replace(REPORT, success_last=0.1).passed


def test_each_task_says_what_gain_it_promises_and_over_how_many_answers() -> None:
    text = dataclasses.replace(REPORT, needed_gain=0.4, window=500, success_first=0.3, success_last=0.75).as_text()
    assert "it rose by 0.450, and 0.4 is needed" in text
    assert "over 500 sampled answers" in text
    assert "its standard error is at most 0.022" in text
    assert "first 500, version 0" in text
    short = dataclasses.replace(REPORT, needed_gain=0.4, success_first=0.3, success_last=0.69)
    assert short.failures == ("success rose by 0.390, at least 0.4 was expected",)


@pytest.mark.parametrize(
    ("demonstrated", "says"),
    [
        (0.0, "they teach the format of an answer, not the task"),
        (0.25, "60 supervised steps on examples of which 25% show the"),
        (None, "examples of their formats that the"),
    ],
)
def test_what_the_model_was_shown_before_is_said(demonstrated: float | None, says: str) -> None:
    text = dataclasses.replace(REPORT, demonstrated=demonstrated).as_text()
    assert says in text
    assert ("not the task" in text) == (demonstrated == 0.0)
    assert max(len(line) for line in text.splitlines() if line.startswith(("Before", "right", "and the rise"))) <= 100


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"success_last": 0.49}, "success rose by 0.490"),
        ({"ledger": {**BOOK, "balanced": False}}, "the ledger does not balance"),
        ({"verify": {"batches": 5, "mismatches": 2, "differences": ["a", "b"]}}, "verification found 2 differences"),
    ],
)
def test_each_broken_promise_fails_the_demo_by_name(changes: dict[str, Any], says: str) -> None:
    report = dataclasses.replace(REPORT, **changes)
    assert not report.passed
    assert len(report.failures) == 1
    assert says in report.failures[0]
    assert f"FAILED: {report.failures[0]}" in report.as_text()


def test_a_program_reads_the_promised_keys() -> None:
    report = json.loads(json.dumps(REPORT.as_dict()))
    assert report["heldout_success_first"] == 0.0
    assert report["heldout_success_last"] == 0.85
    assert (report["heldout_version_first"], report["heldout_version_last"]) == (0, 9)
    assert report["ledger"]["dropped"] == {"zero_variance": 20}
    assert report["selection"] == report["ledger"]["selection"]
    assert report["passed"] is True
    assert report["faults"] == [
        {"role": "group-1", "pid": 7, "step": 84, "at_s": 31.0, "back_s": 2.5, "back": "its partitions"}
    ]
    assert report["lineage"]["children"] == [{"kind": "batch", "name": "0-7"}]
    assert report["replay"]["changed"] == {"estimator": [["rloo"], "grpo"]}


def test_the_text_ends_with_what_the_log_can_tell() -> None:
    text = REPORT.as_text()
    assert "group-1     step 84, 31 s  2.5 s, its partitions" in text
    assert "└─ batch 0-7" in text
    assert "estimator: rloo -> grpo" in text


def test_the_text_fits_a_terminal_and_is_whole_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(map(len, REPORT.as_text().splitlines())) > 500
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert max(map(len, REPORT.as_text().splitlines())) <= 100


def test_a_ledger_that_does_not_balance_names_what_is_wrong() -> None:
    text = ledger_text({**BOOK, "balanced": False, "problems": ["rollouts[3] offset 7: in two places"]})
    assert "DOES NOT BALANCE" in text
    assert "rollouts[3] offset 7" in text
    assert "zero variance" in text


def test_a_verification_names_what_differs() -> None:
    text = verification_text({"batches": 5, "mismatches": 1, "differences": ["batch 3-7: advantages"]})
    assert "1 difference" in text
    assert "batch 3-7: advantages" in text


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert table(("name", "n"), [("a", 1), ("long name", 1234567)]).splitlines() == [
        "name               n",
        "a                  1",
        "long name  1,234,567",
    ]


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (45_200_000, "45.2 MB"), (3 * 10**15, "3000.0 TB")],
)
def test_sizes_are_written_for_people(size: int, text: str) -> None:
    assert bytes_text(size) == text


def test_with_an_engine_of_others_its_versions_decide_and_the_report_says_so() -> None:
    use = EngineUse(engine="vllm", published=9, versions=8, rollouts_by_versions={1: 90, 2: 10}, unnamed=0)
    report = dataclasses.replace(REPORT, success_last=0.01, engine=use)
    assert report.passed, "it need not have learned"
    text = report.as_text()
    assert "PASSED depends on the engine (vllm), and not on success" in text
    assert "rollouts carry tokens of 8, and 3 are needed" in text
    assert "10 rollouts carry several versions" in text
    assert "(decides)" not in text
    assert json.loads(json.dumps(report.as_dict()))["engine"]["versions"] == 8
    few = dataclasses.replace(report, engine=dataclasses.replace(use, versions=2, unnamed=5))
    assert few.failures == (
        "rollouts carry 2 policy versions, at least 3 were expected",
        "5 rollouts have tokens of no known version",
    )
    assert not dataclasses.replace(report, verify={**report.verify, "mismatches": 1}).passed
