"""SQL over the current manifests of an archive: its tables and predefined views, in an isolated DuckDB.

Queries only read files that the manifests name, after a check of their digests, and write nothing.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from rollstream.consumers.archive import manifest as manifests
from rollstream.consumers.archive.manifest import ArchiveManifest
from rollstream.consumers.archive.tables import ENTRIES, SCHEMAS
from rollstream.consumers.archive.writer import check_digests
from rollstream.topics.errors import ConfigurationError, StateRefused
from rollstream.topics.files.stores import FsspecStore, LocalStore, Store

_ISOLATED: Mapping[str, str] = {"enable_external_access": "false"}
"""DuckDB settings that keep queries from accessing files."""
_STORED = "_stored"
"""Suffix of the tables as stored in files; queries read the tables without suffix, which have more columns."""
VIEWS: Mapping[str, tuple[str, str]] = {
    "fates": (
        "each rollout with its fate: batched, dropped or not settled; its batch and advantage, or the reason",
        """
        select r.*, b.batch_id, b.advantage, d.reason, d.age_ms,
               case when b.batch_id is not null then 'batched' when d.reason is not null then 'dropped'
                    else 'not settled' end as fate
        from rollouts r
        left join batches b on b.run = r.run and b.partition = r.partition and b.source_offset = r."offset"
        left join drops d on d.run = r.run and d.partition = r.partition and d.rollout_offset = r."offset"
        """,
    ),
    "success": (
        "rollouts by environment and policy version: share that succeeded, mean reward, length",
        """
        select run, environment, policy_version, count(*) as rollouts,
               avg((coalesce(reward_components['exact'], reward) between 1 and 'infinity'::double)::int) as success,
               avg(reward) as reward, avg(sampled) as sampled, avg(truncated::int) as truncated
        from rollouts group by all order by run, environment, policy_version
        """,
    ),
    "drops_by_reason": (
        "what was dropped, by environment and reason",
        """
        select run, environment, reason, count(*) as drops, sum(tokens)::bigint as tokens, avg(age_ms) as age_ms
        from drops group by all order by run, environment, drops desc, reason
        """,
    ),
    "length_by_outcome": (
        "tokens and rewards of rollouts by fate and reason",
        """
        select run, environment, fate, coalesce(reason, '') as reason, count(*) as rollouts, avg(length) as length,
               avg(sampled) as sampled, avg(reward) as reward, avg(truncated::int) as truncated
        from fates group by all order by run, environment, fate, reason
        """,
    ),
    "selection": (
        "lengths and rewards by environment: of all rollouts, and of those that were batched",
        """
        select run, environment, count(*) as rollouts, count(batch_id) as batched,
               avg(sampled) as sampled, avg(sampled) filter (batch_id is not null) as sampled_batched,
               avg(reward) as reward, avg(reward) filter (batch_id is not null) as reward_batched
        from fates group by all order by run, environment
        """,
    ),
    "tokens": (
        "each token of rollouts archived with --arrays: log-probability, and text by the run's newest tokenizer",
        """
        with newest as (select run, arg_max(tokenizer, "offset") as tokenizer from vocabulary group by run),
        texts as (
            select distinct v.run, v.token, v.text
            from vocabulary v join newest n on n.run = v.run and n.tokenizer = v.tokenizer
        ),
        each as (
            select run, environment, "partition", "offset", uid, unnest(range(len(tokens))) as position,
                   unnest(tokens) as token, unnest(loss_mask) as sampled, unnest(logprobs) as logprob
            from rollouts
        )
        select each.*, texts.text from each left join texts using (run, token)
        order by run, "partition", "offset", position
        """,
    ),
    "latest_steps": (
        "each step of each learner once, as it was executed last",
        """
        select * from steps
        qualify row_number() over (partition by run, learner, step order by "offset" desc) = 1
        order by run, learner, step
        """,
    ),
    "latest_uses": (
        "each batch that a learner trained on or skipped, with the step as it was executed last",
        """
        select * from uses
        qualify dense_rank() over (partition by run, learner, step order by "offset" desc) = 1
        order by run, learner, step, index_offset
        """,
    ),
}


_FIRST_MS, _LAST_MS = -62_135_596_800_000, 253_402_300_799_999
"""The years 1 to 9999. Times outside this range, which any producer may send, are null in queries."""


def times_of(table: str) -> Mapping[str, str]:
    """Return the columns of type TIMESTAMP WITH TIME ZONE that a table gets, by the numeric column that each converts.

    For example `timestamp_at` for `timestamp_ms`, `created_at` for `created_s`.
    """
    names = SCHEMAS[table].names
    return {name: f"{name.rpartition('_')[0]}_at" for name in names if name in _TIMES}


_TIMES = {"timestamp_ms": 1, "cut_ms": 1, "opened_ms": 1, "sealed_ms": 1, "finished_ms": 1, "created_s": 1000}
"""Columns with times since 1970, and the number of milliseconds in the unit of each. 0 is no time: it is not known."""


def queried_type(stored: pa.DataType) -> pa.DataType:
    """Return the type that a stored column has in queries, where lists of entries are maps."""
    return pa.map_(pa.string(), stored.value_type.field("value").type) if stored in ENTRIES else stored


def _with_times(table: str, stored: str) -> str:
    """Return the query for a table, with lists of entries as maps, and each numeric time followed by its timestamp."""
    times, columns = times_of(table), []
    for name, kind in zip(SCHEMAS[table].names, SCHEMAS[table].types, strict=True):
        columns.append(f'map_from_entries("{name}") as "{name}"' if kind in ENTRIES else f'"{name}"')
        if name in times:
            ms = f'"{name}" * {_TIMES[name]}'
            columns.append(
                f"case when {ms} <> 0 and {ms} between {_FIRST_MS} and {_LAST_MS} "
                f'then make_timestamptz(cast({ms} * 1000 as bigint)) end as "{times[name]}"'
            )
    return f"select {', '.join(columns)} from {stored}"


@dataclass(frozen=True)
class QueryResult:
    """Rows of a query, with the names of its columns."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[Any, ...]]


def query(store: Store, statement: str, runs: Sequence[str] | None = None) -> QueryResult:
    """Run one SELECT over all or some runs of an archive.

    Raises ConfigurationError if DuckDB is missing, the archive is empty, or the statement is invalid or not read-only,
    and StateRefused if a file that it reads is missing or differs from the manifest.
    """
    try:
        import duckdb
    except ImportError as error:
        raise ConfigurationError('SQL over archives needs DuckDB: pip install "rollstream[sql]"') from error
    known = _manifests(store, runs)
    connection = duckdb.connect(":memory:", config=dict(_ISOLATED))
    try:
        statements = connection.extract_statements(statement)
        reads = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
        if len(statements) != 1 or statements[0].type not in reads:
            raise ConfigurationError("sql accepts one read-only statement, such as select * from success")
        read = _tables_read(statement)
        # This is not done while the query runs, because DuckDB may lose errors from the threads that scan files.
        current = [check_digests(store, manifest, read) for manifest in known]
        _define(connection, _tables(store, current, read), "view")
        # The query must not access files of this machine or change settings.
        connection.execute("set lock_configuration = true")
        # Through Arrow, because DuckDB needs pytz to convert times to Python.
        result = connection.sql(statements[0]).to_arrow_table()
        columns = [column.to_pylist(maps_as_pydicts="lossy") for column in result.columns]
        return QueryResult(tuple(result.column_names), list(zip(*columns, strict=True)))
    except duckdb.Error as error:
        raise ConfigurationError(f"the query cannot be answered: {' '.join(str(error).split())}") from error
    except FileNotFoundError as error:
        raise StateRefused("an archiver merged files that the query was about to read; run it again") from error
    finally:
        connection.close()


def _define(connection: Any, tables: Mapping[str, Any], kind: str) -> None:
    """Create the tables and views that queries see, each as a view or as a table."""
    connection.execute("set TimeZone = 'UTC'")
    for name, table in tables.items():
        connection.register(f"{name}{_STORED}", table)
        connection.execute(f"create {kind} {name} as {_with_times(name, f'{name}{_STORED}')}")
    for name, (_about, text) in VIEWS.items():
        connection.execute(f"create {kind} {name} as {text}")


def _tables_read(statement: str) -> set[str]:
    """Return the tables of the archive that a statement reads, directly or through views."""
    import duckdb

    with duckdb.connect(":memory:", config=dict(_ISOLATED)) as empty:
        _define(empty, {name: pa.Table.from_batches([], schema=schema) for name, schema in SCHEMAS.items()}, "table")
        for name in SCHEMAS:
            # A name under which data is registered would not be listed as a table.
            empty.unregister(f"{name}{_STORED}")
        return _tables_in(empty, statement)


def _tables_in(connection: Any, statement: str) -> set[str]:
    """Return the tables that a statement reads, in a connection in which the views are also tables."""
    tables: set[str] = set()
    for name in connection.get_table_names(statement):
        known = name.lower().removesuffix(_STORED)
        tables |= _tables_in(connection, VIEWS[known][1]) if known in VIEWS else {known}
    return tables


def _manifests(store: Store, runs: Sequence[str] | None) -> list[ArchiveManifest]:
    """Return the current manifests of all or some runs. Raises ConfigurationError if there is none."""
    held = manifests.runs_of(store)
    chosen = (run for run in held if runs is None or run in runs)
    current = [manifest for run in chosen if (manifest := manifests.newest(store, run))]
    if not current:
        raise ConfigurationError(
            f"{store.url} holds no archive of {'any run' if runs is None else ', '.join(runs)}; make one with "
            f"`rollstream archive`"
        )
    return current


def _tables(store: Store, current: Sequence[ArchiveManifest], read: Set[str]) -> dict[str, Any]:
    """Return every table as an Arrow data set of the files in the current manifests; unread tables are empty."""
    from pyarrow import dataset, fs

    if isinstance(store, FsspecStore):
        files, place = fs.PyFileSystem(fs.FSSpecHandler(store.files)), store.path
    else:
        assert isinstance(store, LocalStore)
        root = store.root
        files, place = fs.LocalFileSystem(), lambda name: str(root / name)
    tables: dict[str, Any] = {}
    for name, schema in SCHEMAS.items():
        paths = [place(file.path) for manifest in current for file in manifest.files_of(name)]
        # Files hold all columns; none is inferred from folders.
        tables[name] = (
            dataset.dataset(paths, schema=schema, format="parquet", filesystem=files)
            if paths and name in read
            else pa.Table.from_batches([], schema=schema)
        )
    return tables
