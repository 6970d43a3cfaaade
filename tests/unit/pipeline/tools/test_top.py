"""The live view fits a terminal of 80 columns and 24 lines, and says what the records say, whatever order they came
in.
"""

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from rollstream.pipeline.audit.configuration_history import ConfigurationSummary
from rollstream.pipeline.run.run_statistics import Rate, RunSnapshot, RunStatistics
from rollstream.pipeline.tools.top import frame, line, sparkline
from rollstream.topics.records import (
    BatchIndexEntry,
    BatchUse,
    FateCount,
    FinishedOffsets,
    Int64,
    JournalRecord,
    LearnerStep,
    PolicyManifest,
)
from rollstream.topics.records.journal import to_ranges

MIDDLE = RunSnapshot(
    run="demo",
    seconds=95.2,
    quiet_s=0.2,
    produced=111_428,
    rollouts=110_096,
    batched=89_456,
    batches=1_400,
    trained=84_736,
    skipped=4_544,
    dropped={"zero_variance": 20_640, "stale_version": 12, "late": 3, "invalid": 2, "too_old": 1},
    control=1_332,
    unread=42,
    waiting=3,
    step=331,
    policy_version=331,
    policy_age_s=0.3,
    sampled_version=329,
    rollouts_per_s=1160.0,
    read_per_s=1170.0,
    batches_per_s=14.7,
    steps_per_s=3.5,
    policies_per_s=3.4,
    reward=0.966,
    success=0.904,
    rewards=tuple(i / 36 for i in range(36)),
    successes=(0.0, 0.5, 1.0),
    staleness={0: 70_000, 1: 10_000, 2: 4_000, 3: 100, 7: 20},
)
SHOWN = """\
 demo                                                     95 s of records, live
╭──────────────────────────────────────────────────────────────────────────────╮
│ envs ── 1,160/s ──▶ rollouts ── 1,170/s ──▶ grouping ─── 14.7/s ───▶ batches │
│                     111,428, 42 unread      0 in flight                1,400 │
│  ▲                                                  3 waiting, 3.5/s steps ▼ │
│ inference ◀─────── 2 behind ────── weights ◀──────── 3.4/s ───────── learner │
│ samples version 329                version 331, 0.3 s ago           step 331 │
╰──────────────────────────────────────────────────────────────────────────────╯
╭─ rewards of rollouts produced ───────╮╭─ versions behind, when trained on ───╮
│ reward  0.966                        ││ 0  ██████████████████████████ 70,000 │
│ ▁▁▁▂▂▂▂▂▃▃▃▃▃▄▄▄▄▄▅▅▅▅▅▅▆▆▆▆▆▇▇▇▇▇██ ││ 1  ████                       10,000 │
│ success  0.904                       ││ 2  █                           4,000 │
│ ▁▅█                                  ││ 3+                               120 │
╰──────────────────────────────────────╯╰──────────────────────────────────────╯
╭─ where records are ──────────────────╮╭─ dropped ────────────────────────────╮
│ produced  111,428  unread         42 ││ zero variance ███████████████ 20,640 │
│ batched    89,456  in flight       0 ││ stale version                     12 │
│ trained    84,736  dead letters    0 ││ late                               3 │
│ skipped     4,544  control     1,332 ││ others                             3 │
╰──────────────────────────────────────╯╰──────────────────────────────────────╯
"""
LARGE = replace(
    MIDDLE,
    run="a-run-with-a-name-" * 7,
    quiet_s=9e6,
    seconds=9e6,
    produced=10**12,
    unread=10**11,
    in_flight=10**10,
    batches=10**9,
    waiting=10**8,
    step=10**7,
    policy_version=10**7,
    policy_age_s=9e6,
    sampled_version=3,
    waiting_for_labels=10**12,
    rollouts_per_s=123_456.0,
    read_per_s=123_456.0,
    batches_per_s=99_999.0,
    dropped={"superseded_version": 10**11},
    staleness={0: 10**11},
)


def shown(snapshot: RunSnapshot, width: int = 80) -> list[str]:
    console = Console(width=width, height=24, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(frame(snapshot, width))
    return capture.get().splitlines()


def test_a_frame_shows_everything_on_one_screen() -> None:
    assert [text.rstrip() for text in shown(MIDDLE)] == SHOWN.splitlines()


def test_rollouts_that_wait_for_labels_are_shown_between_environments_and_rollouts() -> None:
    waiting = replace(MIDDLE, waiting_for_labels=1200)
    [label_line] = [text for text in shown(waiting) if "▲" in text]
    assert label_line == "│  ▲  1,200 wait for labels                           3 waiting, 3.5/s steps ▼ │"
    assert "dropped 20,658  1,200 wait for labels" in line(waiting)


def test_the_configuration_in_force_stands_below_the_flow() -> None:
    configuration = ConfigurationSummary(
        generation=3,
        before=2,
        core_version=1,
        estimator="rloo\x1b",
        mark_keys=1,
        changed={"estimator": ["grpo", "rloo"]},
    )
    configured = replace(MIDDLE, configuration=configuration)
    text = "generation 3, core 1, estimator rloo\\u001b, marks signed, changed estimator"
    assert f"─ {text} ─" in shown(configured, 120)[7]
    assert line(configured).endswith(f"dropped 20,658  {text}")
    long = replace(configuration, changed={str(name): [0, 1] for name in range(100)})
    assert {len(row) for row in shown(replace(MIDDLE, configuration=long))} == {80}


def test_names_in_titles_are_no_markup() -> None:
    paused = shown(replace(MIDDLE, paused_environments=("[/]", "[red]")), 120)
    assert any("paused: [/], [red]" in row for row in paused)


def test_the_reason_of_drops_in_a_title_is_not_obeyed_by_a_terminal() -> None:
    stalled = replace(MIDDLE, stalled_stage="grouping", stalled="all are dropped: late\x1b]0;x\x07")
    assert r"─ stalled at grouping: all are dropped: late\u001b]0;x\u0007 ─" in shown(stalled, 120)[1]


@pytest.mark.parametrize("snapshot", [MIDDLE, LARGE, RunSnapshot(run="x")], ids=["middle", "large", "nothing"])
@pytest.mark.parametrize("width", [80, 97, 200])
def test_a_frame_is_as_high_as_any_other_and_never_too_wide(snapshot: RunSnapshot, width: int) -> None:
    lines = shown(snapshot, width)
    assert len(lines) == 20
    assert {len(text) for text in lines} == {min(width, 120)}


def test_a_line_says_when_a_run_is_quiet() -> None:
    assert line(MIDDLE) == (
        "step 331  version 331  rollouts 110,096 (1,160/s)  reward 0.966  success 0.904  batches 1,400 (3 waiting)  "
        "in flight 0  unread 42  dropped 20,658"
    )
    assert line(replace(MIDDLE, quiet_s=300.0)).endswith("dropped 20,658  quiet for 5 min")


def test_progress_through_history_is_shown_instead_of_quiet_time() -> None:
    reading = replace(MIDDLE, quiet_s=300.0, history=120_000, history_left=68_000)
    assert line(reading) == f"reading history, 43 %  {line(MIDDLE)}"
    assert shown(reading)[0].rstrip().endswith("of records, reading history, 43 %")
    assert reading.as_dict()["quiet"] is False


def test_a_sparkline_shows_the_newest_and_stretches_for_what_passes_its_bounds() -> None:
    assert sparkline((0.0, 0.5, 1.0), 8) == "▁▅█"
    assert sparkline((0.0, 0.5, 1.0), 2) == "▅█"
    assert sparkline((-1.0, 1.0), 8) == "▁█"
    assert sparkline((), 8) == ""


def test_a_rate_is_over_whole_seconds_before_now() -> None:
    rate = Rate()
    for second in range(100):
        rate.add(second * 1000 + 500, 3)
    assert rate.per_s(100_000) == 3.0
    assert rate.per_s(100_999) == 3.0
    assert rate.per_s(105_000) == 1.5
    assert rate.per_s(200_000) == 0.0
    young = Rate()
    young.add(7_900, 4)
    assert young.per_s(8_100) == 4.0


def journal(begin: int, position: int, **values: Any) -> JournalRecord:
    counts = tuple(
        FateCount(environment="e", fate=fate, rollouts=n, tokens=0) for fate, n in values.pop("counts", {}).items()
    )
    always = {
        "partition": 0, "sequence": 0, "core_version": 1, "topic_id": "", "partitions": 1, "watermark": 0,
        "watermark_stream_time_ms": 0, "watermark_policy_version": 0, "watermark_generation": 0,
        "watermark_configuration": "", "stream_time_ms": 0, "policy_version": 0, "generation": 0, "batch_number": 0,
    }  # fmt: skip
    return JournalRecord(begin=begin, position=position, counts=counts, **(always | values))


def runs(*offsets: int) -> Int64:
    return to_ranges(list(offsets))


def entry(batch_id: str, version: int) -> BatchIndexEntry:
    return BatchIndexEntry(
        batch_id=batch_id, partition=0, offset=0, rollouts=4, tokens=8, trained_tokens=8,
        lowest_version=version, highest_version=version, size_bytes=1, digest="",
    )  # fmt: skip


def step(number: int, *uses: tuple[str, str], version: int | None = None) -> LearnerStep:
    return LearnerStep(
        learner="main",
        step=number,
        input_run="r",
        uses=tuple(BatchUse(batch_id=name, index_offset=0, rows=4, use=use) for name, use in uses),  # type: ignore[arg-type]
        position=0,
        policy_version=number if version is None else version,
        params_digest="d",
        trained_total=4 * number,
        skipped_total=number,
    )


def test_every_record_is_somewhere_before_and_after_grouping_read_it() -> None:
    flow = RunStatistics("r")
    for offset in range(10):
        flow.record(0, offset, 1000 + offset)
    assert flow.snapshot(2000).unread == 10
    finished = (FinishedOffsets(fate="batched", runs=runs(0, 1, 2)), FinishedOffsets(fate="dropped", runs=runs(3)))
    flow.journal(journal(0, 6, admitted=runs(4, 5), finished=finished, counts={"batched": 3, "dropped:late": 1}), 1100)
    snapshot = flow.snapshot(2000)
    assert (snapshot.produced, snapshot.unread, snapshot.in_flight) == (10, 4, 2)
    assert (snapshot.batched, snapshot.dropped) == (3, {"late": 1})
    # The journal may be read before the records that it describes.
    finished = (FinishedOffsets(fate="batched", runs=runs(*range(4, 12))),)
    flow.journal(journal(6, 12, finished=finished, counts={"batched": 11, "dropped:late": 1}), 1200)
    flow.record(0, 10, 1250)
    snapshot = flow.snapshot(2000)
    assert (snapshot.produced, snapshot.unread, snapshot.in_flight, snapshot.batched) == (12, 0, 0, 11)


def test_a_journal_without_its_beginning_begins_with_a_snapshot() -> None:
    flow = RunStatistics("r")
    flow.journal(journal(8, 8, snapshot=True, unfinished=runs(5, 6), part=0, parts=2, counts={"batched": 5}), 1000)
    flow.journal(journal(8, 8, snapshot=True, unfinished=runs(7), part=1, parts=2, counts={"batched": 5}), 1000)
    assert (flow.snapshot(2000).produced, flow.snapshot(2000).in_flight) == (8, 3)
    finished = (FinishedOffsets(fate="batched", runs=runs(5, 6, 7, 8)),)
    flow.journal(journal(8, 9, finished=finished, counts={"batched": 9}), 1000)
    flow.journal(journal(9, 9, snapshot=True, unfinished=runs(6), counts={"batched": 9}), 1000)
    assert (flow.snapshot(2000).produced, flow.snapshot(2000).in_flight) == (9, 0)


@pytest.mark.parametrize("index_first", [True, False])
def test_lag_is_counted_from_the_version_a_step_began_with(index_first: bool) -> None:
    flow = RunStatistics("r")
    entries = (entry("0-0", 0), entry("0-1", 1), entry("0-2", 0), entry("0-3", 2))
    steps = (step(0), step(1, ("0-0", "trained")), step(2, ("0-2", "trained"), ("0-1", "skipped")))
    if index_first:
        for e in entries:
            flow.entry(e, 1000)
    for s in (*steps, steps[2]):  # the last step is made again after a crash
        flow.step(s, 2000)
    if not index_first:
        for e in entries:
            flow.entry(e, 1000)
    snapshot = flow.snapshot(3000)
    assert snapshot.staleness == {0: 4, 1: 4}
    assert (snapshot.batches, snapshot.waiting, snapshot.step) == (4, 1, 2)
    assert (snapshot.trained, snapshot.skipped) == (8, 2)


@pytest.mark.parametrize("index_first", [True, False])
def test_steps_that_compaction_left_behind_newer_ones_are_counted_once(index_first: bool) -> None:
    flow = RunStatistics("r")
    entries = [entry(f"0-{number}", number) for number in range(4)]
    steps = [step(number + 1, (f"0-{number}", "trained")) for number in range(4)]
    for e in entries if index_first else ():
        flow.entry(e, 1000)
    # A learner that was killed after step 3 sent steps 1 and 2 of its checkpoint again, and then made step 4.
    for s in (steps[2], steps[0], steps[1], steps[3], steps[1]):
        flow.step(s, 2000)
    for e in () if index_first else entries:
        flow.entry(e, 1000)

    snapshot = flow.snapshot(3000)
    assert (snapshot.waiting, snapshot.step) == (0, 4)
    assert sum(snapshot.staleness.values()) == 16


def test_a_step_whose_skips_were_recorded_before_it_was_made_is_counted_when_it_is_made() -> None:
    flow = RunStatistics("r")
    for number in range(2):
        flow.entry(entry(f"0-{number}", number), 1000)
    flow.step(replace(step(1, ("0-0", "skipped")), params_digest=""), 2000)
    assert flow.snapshot(3000).waiting == 1
    flow.step(step(1, ("0-0", "skipped"), ("0-1", "trained")), 2500)
    assert flow.snapshot(3000).waiting == 0


def test_skips_of_a_waiting_step_that_are_recorded_again_and_again_take_no_more_memory() -> None:
    def kept(batches: int) -> int:
        flow = RunStatistics("r")
        skips: list[tuple[str, str]] = []
        tracemalloc.start()
        try:
            for number in range(batches):
                flow.entry(entry(f"0-{number}", 0), 1000)
                skips.append((f"0-{number}", "skipped"))
                flow.step(replace(step(1, *skips), params_digest=""), 2000)
            size, _peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert flow.snapshot(3000).waiting == 0
        return size

    assert kept(400) < 6 * kept(100), "each record names all skips so far"


def test_steps_of_a_trainer_that_records_no_digest_are_counted_once() -> None:
    flow = RunStatistics("r")
    for number in range(2):
        flow.entry(entry(f"0-{number}", number), 1000)
    for s in (step(1, ("0-0", "trained")), step(2, ("0-1", "trained")), step(2, ("0-1", "trained"))):
        flow.step(replace(s, params_digest=""), 2000)

    snapshot = flow.snapshot(3000)
    assert (snapshot.waiting, sum(snapshot.staleness.values()), snapshot.steps_per_s > 0) == (0, 8, True)


def test_the_lag_of_a_late_step_is_that_of_the_version_before_it() -> None:
    steps = [step(number, (f"0-{number}", "trained"), version=0 if number < 4 else 4) for number in range(1, 7)]
    steps = [replace(s, policy_version=s.policy_version if s.step in (1, 4) else -1) for s in steps]
    in_order, late = RunStatistics("r"), RunStatistics("r")
    for flow, order in ((in_order, steps), (late, [steps[5], *steps[:5]])):
        for number in range(1, 7):
            flow.entry(entry(f"0-{number}", 0), 1000)
        for s in order:
            flow.step(s, 2000)

    assert late.snapshot(3000).staleness[4] >= in_order.snapshot(3000).staleness[4] - 4
    assert late.snapshot(3000).waiting == 0


def test_a_quiet_run_keeps_its_last_rates() -> None:
    flow = RunStatistics("r")
    for second in range(20):
        for _ in range(5):
            flow.rollout(second * 1000, 3, 0.5, 1.0)
        flow.record(0, second, second * 1000)
    flow.manifest(
        PolicyManifest(version=4, learner="main", step=4, epoch="", tensors=(), chunks=(), digest="", created=15.0),
        15_000,
    )
    live, over = flow.snapshot(20_000), flow.snapshot(1_019_000)
    assert live.rollouts_per_s == over.rollouts_per_s == 5.0
    assert (live.quiet, over.quiet, over.quiet_s) == (False, True, 1000.0)
    assert (live.policy_version, live.policy_age_s, live.sampled_version) == (4, 5.0, 3)
    assert live.rewards == (0.5,) * 20
    assert len(RunStatistics("r").snapshot(0).rewards) == 0


def test_curves_are_means_over_equal_spans() -> None:
    flow = RunStatistics("r")
    for second in range(72):
        flow.rollout(second * 1000, 0, float(np.floor(second / 2)), 0.0)
    assert flow.snapshot(72_000).rewards == tuple(map(float, range(36)))


def test_any_record_is_shown_on_the_same_screen() -> None:
    flow = RunStatistics("odd")
    for at_ms in (-5, 2**62, 1_000_000):
        flow.rollout(at_ms, 2**62, 1e30, 0.0)
        flow.record(0, 0, at_ms)
    for created in (float("nan"), float("inf"), 1e300, -1.0):
        manifest = PolicyManifest(
            version=2**62, learner="", step=0, epoch="", tensors=(), chunks=(), digest="", created=created
        )
        flow.manifest(manifest, 1_000_500)
    snapshot = flow.snapshot(2_000_000, float("inf"), float("nan"))
    assert (snapshot.seconds, snapshot.policy_age_s) == (0.5, 0.0)
    assert len(shown(snapshot)) == 20
    assert line(snapshot)
    assert sparkline([float("nan"), float("inf"), 0.0, float("-inf")], 10) == "▅█▅▁"
