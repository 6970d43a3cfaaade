"""An index gives the same answers however its records were portioned, and treats queries and records as mere data."""

import base64
import fcntl
import itertools
import json
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.consumers.archive.tables import ArchivedRecord
from rollstream.consumers.archive.writer import ArchiveWriter
from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core.task_state import initial_record
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.index import group_query, rollout_query, series, sqlite_files
from rollstream.pipeline.index import writer as writer_module
from rollstream.pipeline.index.group_query import GroupFilter
from rollstream.pipeline.index.indexed_run import RolloutPlace
from rollstream.pipeline.index.rollout_query import RolloutFilter
from rollstream.pipeline.index.run_index import RunIndex
from rollstream.pipeline.index.writer import IndexWriter
from rollstream.pipeline.ui.server.answers import json_text
from rollstream.topics.errors import ConfigurationError, DeadlineExceeded
from rollstream.topics.files.stores import open_store
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.records import Chunk as PolicyChunk
from rollstream.topics.records import JournalRecord, Metrics, NamedArray, Rollout
from rollstream.topics.wire.codec import decode, encode
from tests.support.index_logs import Chunk, ListedLog, MadeRun
from tests.support.runs import rollout


def made(chunks: int, seed: int = 0, groups: int = 3) -> Chunk:
    """Records of a small run, with versions of its policy."""
    run = MadeRun(seed=seed, groups=groups)
    return [record for _ in range(chunks) for record in run.chunk()] + [run.policy(0), run.policy(1)]


def fill(path: Path, log: ListedLog, interruptions: Iterator[int], commit_records: int = 1000) -> None:
    """Fill an index; after as many polls as `interruptions` gives, its writer ends and another one continues."""
    while True:
        with IndexWriter(path, log, commit_records=commit_records) as writer:
            for _ in range(next(interruptions)):
                if not writer.poll() and not writer.poll():
                    return


def content(path: Path) -> dict[str, Any]:
    """Everything that queries return from an index."""
    with closing(sqlite_files.reader(path)) as db:
        listed = rollout_query.page(db, RolloutFilter(), limit=1000)
        return {
            "rollouts": listed,
            "found": rollout_query.page(db, RolloutFilter(text="remainder"), limit=1000),
            "facets": rollout_query.facets(db),
            "groups": group_query.page(db, GroupFilter(), "spread", limit=1000),
            "spread": group_query.spread(db),
            "drops": series.drops(db),
            "weights": series.weights(db),
            "series": series.series(db),
        }


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of a run of four chunks."""
    path = tmp_path_factory.mktemp("index") / "index.sqlite"
    fill(path, ListedLog(made(4)), itertools.repeat(1000))
    return path


@settings(max_examples=8, deadline=None)
@given(
    st.integers(0, 3),
    st.lists(st.integers(1, 60), min_size=1, max_size=8),
    st.lists(st.integers(1, 9), min_size=1),
    st.sampled_from([1, 50, 1000]),
)
def test_an_index_filled_in_interrupted_portions_equals_one_filled_in_one_go(
    seed: int, portions: list[int], interruptions: list[int], commit_records: int
) -> None:
    records = made(2, seed)
    with TemporaryDirectory() as directory:
        whole, parted = Path(directory) / "whole.sqlite", Path(directory) / "parted.sqlite"
        fill(whole, ListedLog(records), itertools.repeat(1000))
        sizes = itertools.cycle(portions)
        fill(parted, ListedLog(records, lambda: next(sizes)), itertools.cycle(interruptions), commit_records)
        assert content(parted) == content(whole)


def test_every_record_has_a_row_with_its_fate(filled: Path) -> None:
    answer = content(filled)["facets"]["fates"]
    rollouts = 4 * 2 * 3 * 8
    assert answer["dropped"] == rollouts // 3
    assert answer["trained"] + answer.get("skipped", 0) == 2 * rollouts // 3
    assert answer["control"] == answer["dead_lettered"] == 8
    assert sum(answer.values()) == rollouts + 16


def test_marks_are_listed_and_counted_only_when_asked_for(filled: Path) -> None:
    with closing(sqlite_files.reader(filled)) as db:
        everything = rollout_query.page(db, RolloutFilter(), limit=1000)
        marks = rollout_query.page(db, RolloutFilter(fate="control"))
        versioned = rollout_query.page(db, RolloutFilter(version_max=100), limit=1000)
    assert (everything["matching"], everything["matching_exact"]) == (4 * 2 * (3 * 8 + 1), True)
    assert len(everything["rows"]) == everything["matching"]
    assert "control" not in {row["fate"] for row in (*everything["rows"], *versioned["rows"])}
    assert marks["matching"] == 8
    assert versioned["rows"]


def test_rollouts_of_several_fates_are_listed_together(filled: Path) -> None:
    with closing(sqlite_files.reader(filled)) as db:
        used = rollout_query.page(db, RolloutFilter(fate="batched,trained,dropped"), limit=1000)
        apart = [rollout_query.page(db, RolloutFilter(fate=fate), limit=1000) for fate in ("trained", "dropped")]
        assert {row["fate"] for row in used["rows"]} == {"trained", "dropped"}
        assert used["matching"] == sum(page["matching"] for page in apart)
        with pytest.raises(ConfigurationError, match="fates are"):
            rollout_query.page(db, RolloutFilter(fate="trained,used"))


def test_an_index_of_other_topics_or_of_another_version_is_built_again(filled: Path, tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    fill(path, ListedLog(made(2)), itertools.repeat(1000))
    other = ListedLog(made(1, seed=9), run="made-again")
    fill(path, other, itertools.repeat(1000))
    with closing(sqlite_files.reader(path)) as db:
        assert rollout_query.page(db, RolloutFilter())["matching"] == 2 * (3 * 8 + 1)
    path.write_bytes(b"no database at all" * 1000)
    fill(path, ListedLog(made(1)), itertools.repeat(1000))
    assert content(path)["rollouts"]["matching"] == 2 * (3 * 8 + 1)


@pytest.mark.parametrize(
    ("wanted", "order"),
    [
        (RolloutFilter(), "newest"),
        (RolloutFilter(environment="env1"), "reward"),
        (RolloutFilter(text="remainder"), "oldest"),
        (RolloutFilter(text="remainder"), "length"),
    ],
)
def test_a_list_can_be_looked_at_anywhere_behind_a_cursor(filled: Path, wanted: RolloutFilter, order: str) -> None:
    with closing(sqlite_files.reader(filled)) as db:
        whole = rollout_query.page(db, wanted, order, limit=1000)
        first = rollout_query.page(db, wanted, order, limit=7)
        for skip in (1, 20, len(whole["rows"]) - 9, len(whole["rows"]) - 7, len(whole["rows"])):
            page = rollout_query.page(db, wanted, order, first["next"], 5, skip)
            assert page["rows"] == whole["rows"][7 + skip :][:5]
            assert (page["next"] is None) == (7 + skip + 5 >= len(whole["rows"]))
            assert page["matching"] == whole["matching"]


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    path, records = tmp_path / "index.sqlite", made(1)
    with IndexWriter(path, ListedLog(records)) as first:
        assert first.poll()
        second = IndexWriter(path, ListedLog(records))
        assert second.poll() == 0
        assert not second.owned
    with second:
        while second.poll():
            pass
        assert second.owned


def test_an_index_that_another_process_is_creating_has_no_records_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "PATIENCE_S", 0.0)
    path = tmp_path / "index.sqlite"
    path.touch()  # SQLite creates a file before its tables.
    with path.with_name(f"{path.name}.lock").open("w") as owner, IndexWriter(path, ListedLog(made(1))) as second:
        fcntl.flock(owner, fcntl.LOCK_EX)
        with pytest.raises(DeadlineExceeded, match="was not read to its end"):
            second.catch_up()


def test_an_index_of_other_topics_is_refused_while_another_process_fills_it(tmp_path: Path) -> None:
    path, config = tmp_path / "index.sqlite", RunConfig(data_dir=tmp_path)
    here, there = ListedLog(made(2)), ListedLog(made(1, seed=9), run="of another cluster")
    with RunIndex(config, path, here) as second, RunIndex(config, path, here) as reader:
        with RunIndex(config, path, there) as first:
            first.catch_up()
            second.begin()
            for query in (second.progress, reader.progress):
                with pytest.raises(ConfigurationError, match="another process fills it; give this server a directory"):
                    query()
        second.catch_up()
        for index in (second, reader):
            assert rollout_query.page(index.db, RolloutFilter())["matching"] == 2 * 2 * (3 * 8 + 1)
        second.close()
        with RunIndex(config, path, there) as first:
            first.catch_up()
            with pytest.raises(ConfigurationError, match="other topics"):
                reader.progress()


@pytest.mark.parametrize("at_start", [True, False])
def test_an_index_that_is_damaged_is_built_again(tmp_path: Path, at_start: bool) -> None:
    path, log = tmp_path / "index.sqlite", ListedLog(made(2))
    fill(path, ListedLog(made(1)), itertools.repeat(1000))
    writer = IndexWriter(path, log)
    if not at_start:
        writer.begin()
    data = bytearray(path.read_bytes())
    data[2 * 4096 :] = b"\xa5" * (len(data) - 2 * 4096)  # The identity is intact.
    path.write_bytes(data)
    with writer:
        while writer.poll():
            pass
    with closing(sqlite_files.reader(path)) as db:
        assert rollout_query.page(db, RolloutFilter())["matching"] == 2 * 2 * (3 * 8 + 1)


HOSTILE = [
    '" or 1=1 --',
    "' union select value from meta --",
    "text NEAR(a b)",
    "text:*",
    'a"b"c',
    "(((",
    "x'; drop table rollouts; --",
    "\0\0\0",
    "-the",
    "the OR answer",
    "☃☃☃",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_of_a_query_is_syntax(filled: Path, text: str) -> None:
    with closing(sqlite_files.reader(filled)) as db:
        for wanted in (
            RolloutFilter(text=text),
            RolloutFilter(environment=text),
            RolloutFilter(uid=text, example=text, group=text, batch=text, worker=text, reason=text),
        ):
            assert rollout_query.page(db, wanted)["rows"] == []
        assert rollout_query.page(db, RolloutFilter())["matching"] == 4 * 2 * (3 * 8 + 1)


@settings(deadline=None)
@given(st.text(min_size=3, max_size=40))
def test_any_text_can_be_searched(filled: Path, text: str) -> None:
    with closing(sqlite_files.reader(filled)) as db:
        rollout_query.page(db, RolloutFilter(text=text))


def test_a_search_finds_what_texts_hold_in_any_case(filled: Path) -> None:
    with closing(sqlite_files.reader(filled)) as db:
        everything = rollout_query.page(db, RolloutFilter(), limit=1000)["rows"]
        number = rollout_query.page(db, RolloutFilter(text="CASE 00000000017"))["rows"]
        assert [row["uid"] for row in number] == ["u000000002-1"]
        answer = rollout_query.page(db, RolloutFilter(text="carrying one"), limit=1000)["rows"]
        assert {row["place"] for row in answer} >= {r["place"] for r in everything if "carrying one" in r["preview"]}


@pytest.mark.parametrize(
    ("order", "after", "text"),
    [("best", None, None), ("newest", "bm90IGpzb24", None), ("reward", "!!!", None), ("newest", None, "ab")],
)
def test_a_bad_parameter_is_refused_with_what_is_wrong(
    filled: Path, order: str, after: str | None, text: str | None
) -> None:
    with closing(sqlite_files.reader(filled)) as db, pytest.raises(ConfigurationError):
        rollout_query.page(db, RolloutFilter(text=text), order, after)


def test_a_number_that_no_row_can_have_matches_nothing(filled: Path) -> None:
    with closing(sqlite_files.reader(filled)) as db:
        for wanted in (RolloutFilter(version=10**30), RolloutFilter(step=-(10**30)), RolloutFilter(version_min=2**63)):
            assert rollout_query.page(db, wanted)["rows"] == []


@pytest.mark.parametrize("order", ["newest", "oldest", "reward"])
def test_pages_of_a_search_follow_one_another(filled: Path, order: str) -> None:
    with closing(sqlite_files.reader(filled)) as db:
        wanted = RolloutFilter(text="the", fate="trained")
        whole = rollout_query.page(db, wanted, order, limit=1000)
        places, after = [], None
        while True:
            page = rollout_query.page(db, wanted, order, after, limit=9)
            places += [row["place"] for row in page["rows"]]
            after = page["next"]
            if after is None:
                break
        assert places == [row["place"] for row in whole["rows"]]
        assert whole["matching"] == len(places) > 50


def test_an_invalid_rollout_stops_no_index_and_is_shown_as_far_as_it_makes_sense(tmp_path: Path) -> None:
    """A worker may write rewards whose squares overflow, and arrays shorter than its tokens."""
    odd: list[Rollout] = [
        rollout("x", 0, reward=1e300),
        rollout("x", 1, reward=-1e300),
        rollout("x", 2, loss_mask=np.ones(2, bool), logprobs=np.zeros(9, "<f4"), branches=0),
        rollout("x", 3, token_arrays={"weight_version": NamedArray.of(np.full(6, np.nan, "<f4"))}),
    ]
    archive = ArchiveWriter(open_store(str(tmp_path / "archive")), "odd")
    archive.begin("rollouts", "id", {0: 0})
    archive.begin("policies", "id", {0: 0})
    for offset, record in enumerate(odd):
        archive.add(ArchivedRecord("rollouts", 0, offset, 0, None, encode(record)))
    manifest = decode(MadeRun().policy(0)[1].value)
    chunks = tuple(PolicyChunk(index=n, partition=0, offset=n, size_bytes=2**62, digest="") for n in range(2))
    archive.add(ArchivedRecord("policies", 0, 0, 0, None, encode(replace(manifest, chunks=chunks))))
    archive.commit({("rollouts", 0): len(odd), ("policies", 0): 1})
    archive.close()
    with RunIndex.open(RunConfig(run="odd", data_dir=tmp_path / "data"), str(tmp_path / "archive")) as index:
        index.catch_up()
        assert rollout_query.page(index.db, RolloutFilter())["matching"] == len(odd)
        assert series.weights(index.db)["versions"] == []
        for offset, record in enumerate(odd):
            tokens = index.details(RolloutPlace(0, offset))["tokens"]
            assert {len(tokens[name]) for name in ("ids", "mask", "logprobs", "versions", "token_rewards")} == {6}
            assert json_text(group_query.estimators(index.db, RolloutPlace(0, offset)))
            assert tokens["ids"] == record.tokens.tolist()


def test_what_a_pruned_part_of_the_journal_finished_is_not_in_flight(tmp_path: Path) -> None:
    """The index has read the journal up to record 0; records 1 to 4 are pruned, and record 5 is a snapshot."""
    run = MadeRun()
    rollouts = [run.record("rollouts", 0, encode(rollout(f"x{n}", 0))) for n in range(20)]
    first = run.record("journal", 0, encode(journal(sequence=0, begin=0, position=10)))
    left = np.array([18, 2], "<i8")
    later = run.record("journal", 0, encode(journal(sequence=5, begin=16, position=20, snapshot=True, unfinished=left)))
    path = tmp_path / "index.sqlite"
    fill(path, ListedLog([*rollouts[:10], first]), itertools.repeat(1000))
    assert content(path)["facets"]["fates"] == {"in_flight": 10}
    fill(path, ListedLog([*rollouts, first, later]), itertools.repeat(1000))
    assert content(path)["facets"]["fates"] == {"in_flight": 2, "settled": 18}


def journal(**changes: Any) -> JournalRecord:
    return replace(initial_record(0, 1, "id", GroupingConfig()), **{"snapshot": False, **changes})


def test_evaluations_count_each_episode_once_and_the_newer_answers(tmp_path: Path) -> None:
    def answer(episode: str, branch: int, reward: float) -> Rollout:
        return rollout(episode, branch, uid=f"{episode}.{branch}", episode_uid=episode, reward=reward, policy_version=1)

    run = MadeRun()
    answers = [answer("e1", 0, 0.0), *(answer("e1", branch, 1.0) for branch in range(3)), answer("e2", 0, 0.0)]
    evals = [run.record("evals", 0, encode(each)) for each in answers]
    assert curve(tmp_path, [run.policy(1), *evals], "reward/evaluated/env") == ([64], [0.5])


def test_a_version_that_was_rolled_back_to_is_at_the_step_of_the_rollback(tmp_path: Path) -> None:
    run = MadeRun()
    rewards = {1: 0.25, 2: 1.0, 3: 0.5}
    made = [
        run.record("rollouts", 0, encode(rollout(f"x{version}", 0, policy_version=version, reward=reward)))
        for version, reward in rewards.items()
    ]
    policies = [run.policy(1, step=10), run.policy(2, step=20), run.policy(3, step=10, digest="1")]
    assert curve(tmp_path, [*made, *policies], "reward/produced") == ([10, 20], [0.25, 0.75])


def test_curves_of_environments_are_apart_and_together(tmp_path: Path) -> None:
    run = MadeRun()
    easy = rollout("x", 0, policy_version=1, environment="easy", reward=1.0)
    hard = rollout("y", 0, policy_version=1, environment="hard", reward=0.0, truncated=True)
    records = [run.policy(1, step=10), *(run.record("rollouts", 0, encode(each)) for each in (easy, hard))]
    for name, values in {"reward": [1.0, 0.0, 0.5], "truncated": [0.0, 1.0, 0.5], "length": [3.0, 3.0, 3.0]}.items():
        for of, value in zip(("easy", "hard", "produced"), values, strict=True):
            assert curve(tmp_path / of, records, f"{name}/{of}") == ([10], [value]), (name, of)


def test_numbers_too_large_to_be_added_up_have_no_mean(tmp_path: Path) -> None:
    run = MadeRun()
    made = [
        run.record(
            "metrics",
            0,
            encode(Metrics(component="i", labels={"role": "infer"}, timestamp=t, values={"requests_per_s": 1e308})),
        )
        for t in (1e9, 1.1e9)
    ]
    steps, means = curve(tmp_path, made, "infer/requests_per_s")
    assert (steps, [math.isnan(mean) for mean in means]) == ([0], [True])


def test_servers_that_ended_are_left_out_while_others_serve(tmp_path: Path) -> None:
    def record(component: str, role: str, timestamp: float, **values: float) -> tuple[str, KafkaRecord]:
        metrics = Metrics(component=component, labels={"role": role}, timestamp=timestamp, values=values)
        return run.record("metrics", 0, encode(metrics))

    run, now = MadeRun(), time.time()
    records = [
        record("infer-0", "infer", now, policy_version=9.0),
        record("infer-1", "infer", now, policy_version=7.0, running=0.0),
        record("infer-2", "infer", now - 3600, policy_version=5.0),
        record("engine-0", "engine", now - 3600, policy_version=4.0),
    ]
    fill(tmp_path / "index.sqlite", ListedLog(records), itertools.repeat(1000))
    assert content(tmp_path / "index.sqlite")["weights"]["serving"] == {"infer-0": 9, "engine-0": 4}


def curve(directory: Path, records: Chunk, name: str) -> tuple[list[int], list[float]]:
    fill(directory / "index.sqlite", ListedLog(records), itertools.repeat(1000))
    with closing(sqlite_files.reader(directory / "index.sqlite")) as db:
        [answer] = series.series(db, "main", [name])["series"]
    return answer["x"], answer["y"]


class SlowWriter(IndexWriter):
    """A writer whose polls return 0, as a poll does that only writes waiting records."""

    def poll(self, wait_s: float = 0.0) -> int:
        super().poll(wait_s)
        return 0


def test_an_index_that_is_full_after_its_deadline_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "PATIENCE_S", 0.0)
    log = ListedLog(made(1))
    with SlowWriter(tmp_path / "index", log) as writer:
        writer.catch_up()
        assert writer.poll() == 0
    with IndexWriter(tmp_path / "index", log) as writer:
        assert writer.poll() == 0


def test_records_that_do_not_decode_are_counted_and_stop_nothing(tmp_path: Path) -> None:
    records = made(1)
    last: dict[tuple[str, int], int] = {}
    for name, record in records:
        last[name, record.partition] = record.offset
    bad = [
        (name, KafkaRecord(f"made.{name}", partition, offset + 1, 5, None, value))
        for (name, partition), offset in last.items()
        for value in (b"\xc3\x01 nothing",)
    ]
    path = tmp_path / "index.sqlite"
    fill(path, ListedLog(records + bad), itertools.repeat(1000))
    with closing(sqlite_files.reader(path)) as db:
        assert rollout_query.page(db, RolloutFilter())["matching"] == 2 * (3 * 8 + 1) + 2
        assert rollout_query.page(db, RolloutFilter(fate="unread"))["matching"] == 2


def test_who_still_asks_an_index_that_is_closed_gets_an_answer(tmp_path: Path) -> None:
    """The page opens an index again once another process fills it; requests may still be in progress."""
    archive = ArchiveWriter(open_store(str(tmp_path / "archive")), "again")
    archive.begin("rollouts", "id", {0: 0})
    for offset in range(3):
        archive.add(ArchivedRecord("rollouts", 0, offset, 0, None, encode(rollout("x", offset))))
    archive.commit({("rollouts", 0): 3})
    archive.close()
    config = RunConfig(run="again", data_dir=tmp_path / "data")
    with RunIndex.open(config, str(tmp_path / "archive")) as filled, ThreadPoolExecutor(1) as another:
        filled.catch_up()
        index = RunIndex.open(config, str(tmp_path / "archive"), fills=False)
        assert another.submit(lambda: rollout_query.page(index.db, RolloutFilter())).result()["matching"] == 3
        index.close()
        assert another.submit(lambda: rollout_query.page(index.db, RolloutFilter())).result()["matching"] == 3


@pytest.mark.parametrize("cursor", [["newest", None, 2**70], ["spread", 1e300, 1], ["spread", 0.5, -(2**70)]])
def test_a_cursor_beyond_what_sqlite_holds_is_refused(filled: Path, cursor: list[Any]) -> None:
    after = base64.urlsafe_b64encode(json.dumps(cursor).encode()).decode().rstrip("=")
    with closing(sqlite_files.reader(filled)) as db, pytest.raises(ConfigurationError, match="does not belong"):
        group_query.page(db, GroupFilter(), cursor[0], after=after)
