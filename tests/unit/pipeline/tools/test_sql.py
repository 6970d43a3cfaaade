"""SQL over an archive made by hand: the ready views' figures, ways to print them, and that it only reads."""

import csv
import hashlib
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from matplotlib.axes import Axes

from rollstream.consumers.archive import manifest as manifests
from rollstream.consumers.archive.sql import VIEWS, query
from rollstream.consumers.archive.tables import SCHEMAS, ArchivedRecord
from rollstream.consumers.archive.writer import ArchiveWriter
from rollstream.pipeline.command_line.cli import main
from rollstream.topics.errors import ConfigurationError, StateRefused
from rollstream.topics.files.stores import Store, open_store
from rollstream.topics.records import BatchUse, Drop, LearnerStep
from rollstream.topics.wire.codec import encode
from tests.support.batches import random_batch
from tests.support.journal_records import journal_record
from tests.support.runs import rollout

DAY_MS = 86_400_000


def used(step: int) -> BatchUse:
    return BatchUse(batch_id=f"0-{step}", index_offset=step, rows=4, use="trained")


def fill(store: Store, run: str = "main") -> None:
    """Eight rollouts of two environments and versions: four batched, two dropped, two not settled."""
    subjects = [
        rollout(f"x{n}", n, environment="add" if n < 4 else "sub/1", policy_version=n % 2, truncated=n == 7)
        for n in range(8)
    ]
    # Not the reward decides whether this one succeeded.
    subjects[2] = replace(subjects[2], reward_components={"exact": 0.0})
    batched = random_batch(0, rows=4)
    drops = tuple(Drop(offset=n, reason="late", environment="sub/1", age_ms=10 * n, tokens=6) for n in (4, 5))
    journal = journal_record(drops=drops)
    steps = [
        LearnerStep(
            learner="main", step=step, input_run=run, uses=(used(step),), position=1, policy_version=step,
            params_digest="", trained_total=4, skipped_total=0, metrics={"loss": loss},
        )
        for step, loss in ((1, 0.5), (2, 0.4), (2, 0.25))
    ]  # fmt: skip
    writer = ArchiveWriter(store, run)
    for topic in ("rollouts", "batches", "journal", "steps"):
        writer.begin(topic, topic, {0: 0})
    values = {"rollouts": subjects, "batches": [batched], "journal": [journal], "steps": steps}
    for topic, records in values.items():
        for offset, record in enumerate(records):
            writer.add(ArchivedRecord(topic, 0, offset, DAY_MS + offset, b"[]", encode(record)))
    writer.commit({(topic, 0): len(records) for topic, records in values.items()})
    writer.close()


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive that tests only read."""
    archive = tmp_path_factory.mktemp("archive")
    fill(open_store(str(archive)))
    return archive


def put_on_manifest(archive: Path, file: Path) -> None:
    """Make a changed file the archived one."""
    store = open_store(str(archive))
    current = manifests.newest(store, "main")
    assert current is not None
    digest, name = hashlib.sha256(file.read_bytes()).hexdigest(), file.relative_to(archive).as_posix()
    changed = tuple(replace(each, sha256=digest) if each.path == name else each for each in current.files)
    manifests.commit(store, replace(current, files=changed))


def rollstream(archive: Path | str, *words: str) -> int:
    return main(["sql", *words, "--archive", str(archive)])


def test_success_is_listed_by_environment_and_version(archive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rollstream(archive, "select environment, policy_version, rollouts, success from success", "--json") == 0
    assert json.loads(capsys.readouterr().out) == [
        {"environment": environment, "policy_version": version, "rollouts": 2, "success": success}
        for environment, version, success in (("add", 0, 0.5), ("add", 1, 0.0), ("sub/1", 0, 1.0), ("sub/1", 1, 0.0))
    ]


def test_drops_lengths_and_selection_add_up(archive: Path) -> None:
    store = open_store(str(archive))
    assert query(store, "select environment, reason, drops, tokens, age_ms from drops_by_reason").rows == [
        ("sub/1", "late", 2, 12, 45.0)
    ]
    rows = query(store, "select environment, fate, reason, rollouts, length, truncated from length_by_outcome")
    assert rows.rows == [
        ("add", "batched", "", 4, 6.0, 0.0),
        ("sub/1", "dropped", "late", 2, 6.0, 0.0),
        ("sub/1", "not settled", "", 2, 6.0, 0.5),
    ]
    assert query(store, "select environment, rollouts, batched from selection").rows == [("add", 4, 4), ("sub/1", 4, 0)]


def test_a_step_executed_again_counts_as_it_was_last(archive: Path) -> None:
    statement = "select step, metrics['loss'] from latest_steps"
    assert query(open_store(str(archive)), statement).rows == [(1, 0.5), (2, 0.25)]


def test_a_batch_of_a_step_executed_again_counts_once(archive: Path) -> None:
    store = open_store(str(archive))
    assert query(store, "select count(*) from uses").rows == [(3,)]
    assert query(store, "select step, batch_id, rows from latest_uses").rows == [(1, "0-1", 4), (2, "0-2", 4)]


def test_every_table_and_view_can_be_queried_even_if_empty(archive: Path) -> None:
    store = open_store(str(archive))
    # A row counts if any of its columns does, so each column is read.
    counts = ", ".join(f"(select count({name}) from {name})" for name in (*SCHEMAS, *VIEWS))
    [row] = query(store, f"select {counts}").rows
    assert len(row) == len(SCHEMAS) + len(VIEWS)
    assert query(store, "select count(*) from evals").rows == [(0,)]


@pytest.mark.parametrize("harm", ["changed", "deleted"])
def test_a_file_that_is_not_the_archived_one_is_named_and_not_read(
    tmp_path: Path, harm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = tmp_path / "archive"
    fill(open_store(str(archive)))
    [file] = archive.glob("run=main/table=steps/**/*.parquet")
    if harm == "changed":
        table = pq.read_table(file)
        pq.write_table(table.set_column(table.schema.get_field_index("step"), "step", pa.array([7, 7, 7])), file)
    else:
        file.unlink()
    for statement in (
        "select * from latest_steps",
        "from STEPS",
        "select * from query_table('steps')",
        "from query('from steps')",
        "from steps_stored",
    ):
        with pytest.raises(StateRefused, match=rf"{file.name} is "):
            query(open_store(str(archive)), statement)
    assert rollstream(archive, "select * from latest_steps") == 2
    assert file.name in capsys.readouterr().err
    assert rollstream(archive, "select count(*) from rollouts") == 0, "other tables are as they were"
    assert rollstream(archive, "with steps as (select 1) select * from steps") == 0, "this is no table of the archive"


def test_runs_of_an_archive_at_a_url_stand_side_by_side(tmp_path: Path) -> None:
    store = open_store(f"memory://{tmp_path.name}")
    fill(store, "one")
    fill(store, "two")
    assert query(store, "select run, count(*) from rollouts group by run order by run").rows == [("one", 8), ("two", 8)]
    assert query(store, "select distinct run from fates", ["two"]).rows == [("two",)]


def test_an_answer_is_a_table_or_csv(archive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "select uid, reward, extra from rollouts order by uid limit 2"
    assert rollstream(archive, words) == 0
    assert capsys.readouterr().out.splitlines() == ["uid   reward  extra", "x0-0   1.000  {}", "x1-1   0.000  {}"]
    assert rollstream(archive, words, "--csv") == 0
    assert list(csv.reader(capsys.readouterr().out.splitlines()))[1] == ["x0-0", "1.0", "{}"]
    assert rollstream(archive, "select 1 as x, 2 as x", "--csv") == 0
    assert capsys.readouterr().out == "x,x\n1,2\n"


@pytest.mark.parametrize(("terminal", "text"), [(True, r"a\u001b[2J"), (False, "a\x1b[2J")])
def test_csv_is_not_obeyed_by_a_terminal_and_is_kept_as_it_is_in_a_file(
    archive: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool, text: str
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    assert rollstream(archive, "select 'a' || chr(27) || '[2J' as x", "--csv") == 0
    assert capsys.readouterr().out == f"x\n{text}\n"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("create table x as select 1",), "one read-only statement"),
        (("copy rollouts to 'x.csv'",), "one read-only statement"),
        (("select 1; drop table rollouts",), "one read-only statement"),
        (("set enable_external_access = true",), "one read-only statement"),
        (("select * from read_text('/etc/hostname')",), "disabled by configuration"),
        (("select * from '/etc/hostname'",), "cannot be answered"),
        (("select nosuch from rollouts",), "nosuch"),
        (("select 1", "--json", "--csv"), "give one"),
        (("select uid, reward as x, extra as x from rollouts", "--json"), "the name x; give each"),
        (("select uid from rollouts", "--plot", "x.png"), "two columns"),
        (("select reward, uid from rollouts", "--plot", "x.png"), "numbers in the second column"),
        (("select {'a': step}, step from steps", "--plot", "x.png"), "text, numbers or times in the first column"),
        (("select null, step from steps", "--plot", "x.png"), "text, numbers or times in the first column"),
        (("select uid, reward from rollouts", "--plot", "x.svg"), "writes PNG"),
    ],
)
def test_a_query_that_writes_or_is_invalid_is_one_line(
    archive: Path, words: Sequence[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(archive.rglob("*"))
    assert rollstream(archive, *words) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1
    assert sorted(archive.rglob("*")) == before


@pytest.mark.parametrize("statement", ["select uid, reward from rollouts", "select step, metrics['loss'] from steps"])
def test_two_columns_are_drawn(archive: Path, statement: str, tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    assert rollstream(archive, statement, "--plot", str(picture)) == 0
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize(
    ("column", "kind", "drawn", "why"),
    [
        ("case when i < 99 then i end", "plot", 99, "the others have no x"),
        ("'text ' || i", "bar", 40, "at most 40 bars are drawn"),
    ],
)
def test_rows_that_are_not_drawn_are_counted(
    column: str,
    kind: str,
    drawn: int,
    why: str,
    archive: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: list[int] = []
    draw = getattr(Axes, kind)

    def counted(axes: Axes, xs: Sequence[object], *more: object, **settings: object) -> object:
        counts.append(len(xs))
        return draw(axes, xs, *more, **settings)

    monkeypatch.setattr(Axes, kind, counted)
    picture = tmp_path / "picture.png"
    assert rollstream(archive, f"select {column} as x, i as y from range(100) t(i)", "--plot", str(picture)) == 0
    assert counts == [drawn]
    assert f"{picture} shows {drawn} of 100 rows: {why}" in capsys.readouterr().err


def test_without_a_query_tables_and_views_are_listed(archive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sql", "--archive", str(archive)]) == 0
    text = capsys.readouterr().out
    assert all(f"{name}:" in text for name in (*SCHEMAS, *VIEWS))


def test_only_the_runs_that_are_named_are_read(archive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    statement = "select distinct run from rollouts"
    for named in ((), ("--run", "main"), ("--run", "other", "--run", "main")):
        assert rollstream(archive, statement, "--csv", *named) == 0
        assert capsys.readouterr().out == "run\nmain\n"
    assert rollstream(archive, statement, "--run", "other") == 2
    assert "holds no archive of other" in capsys.readouterr().err


def test_an_empty_archive_and_a_missing_extra_name_the_remedy(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="make one with `rollstream archive`"):
        query(open_store(str(archive / "nothing")), "select 1")
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(ConfigurationError, match=r"rollstream\[sql\]"):
        query(open_store(str(archive)), "select 1")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ConfigurationError, match=r"rollstream\[archive\]"):
        open_store("memory://x")


def test_timestamps_stand_beside_their_numbers(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    writer = ArchiveWriter(store, "times")
    step = LearnerStep(
        learner="main", step=1, input_run="times", uses=(), position=0, policy_version=-1, params_digest="",
        trained_total=0, skipped_total=0, timestamp=1_700_000_000.25,
    )  # fmt: skip
    writer.begin("steps", "id", {0: 0})
    for offset, (at_ms, created_s) in enumerate(
        [(1_700_000_001_500, 1_700_000_000.25), (2**62, math.nan), (-5, 1e300), (1, 0.0)]
    ):
        writer.add(ArchivedRecord("steps", 0, offset, at_ms, b"k", encode(replace(step, timestamp=created_s))))
    writer.commit({("steps", 0): 4})
    writer.close()
    rows = query(store, 'select timestamp_ms, timestamp_at, created_at from steps order by "offset"')
    begin = datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
    assert rows.rows[0] == (
        1_700_000_001_500,
        begin + timedelta(seconds=1.5),
        begin + timedelta(seconds=0.25),
    )
    assert rows.rows[1] == (2**62, None, None)
    assert rows.rows[2][1:] == (datetime(1969, 12, 31, 23, 59, 59, 995_000, tzinfo=UTC), None)
    assert rows.rows[3][2] is None
    assert query(store, "select count(*) as n from steps where timestamp_at > '2023-01-01'").rows == [(1,)]


def test_entries_are_maps_in_queries(archive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    statement = "select step, metrics['loss'] as loss from latest_steps"
    assert query(open_store(str(archive)), statement).rows == [(1, 0.5), (2, 0.25)]
    assert rollstream(archive) == 0
    assert "metrics" in capsys.readouterr().out
    assert main(["sql", "--archive", str(archive), "--json"]) == 0
    assert "metrics map<string, double>" in json.loads(capsys.readouterr().out)["tables"]["steps"]
