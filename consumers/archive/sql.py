"""SQL over an archive's current manifests: its tables, and ready views, in a DuckDB that can reach nothing else.

Reads the files that the manifests name and no others; writes nothing, neither there nor anywhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from consumers.archive import manifest as manifests
from consumers.archive.store import FsspecStore, LocalStore, Store
from consumers.archive.tables import SCHEMAS
from topics.errors import ConfigurationError

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
        "rollouts by environment and policy version: share with a reward above 0, mean reward, length",
        """
        select run, environment, policy_version, count(*) as rollouts, avg((reward > 0)::int) as success,
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
        "tokens and rewards of rollouts by what became of them",
        """
        select run, environment, fate, coalesce(reason, '') as reason, count(*) as rollouts, avg(length) as length,
               avg(sampled) as sampled, avg(reward) as reward, avg(truncated::int) as truncated
        from fates group by all order by run, environment, fate, reason
        """,
    ),
    "selection": (
        "by environment: lengths and rewards of all rollouts beside those that were batched",
        """
        select run, environment, count(*) as rollouts, count(batch_id) as batched,
               avg(sampled) as sampled, avg(sampled) filter (batch_id is not null) as sampled_batched,
               avg(reward) as reward, avg(reward) filter (batch_id is not null) as reward_batched
        from fates group by all order by run, environment
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
}


@dataclass(frozen=True)
class Answer:
    """Rows of a query, with the names of their columns."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[Any, ...]]


def query(store: Store, statement: str, runs: Sequence[str] | None = None) -> Answer:
    """The answer to one SELECT over all runs of an archive, or some of them.

    Raises ConfigurationError where DuckDB is missing, the archive is empty, or the statement is wrong or none that only
    reads.
    """
    try:
        import duckdb
    except ImportError as error:
        raise ConfigurationError('SQL over archives needs DuckDB: pip install "rollstream[sql]"') from error
    connection = duckdb.connect(":memory:", config={"enable_external_access": "false"})
    try:
        statements = connection.extract_statements(statement)
        reads = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
        if len(statements) != 1 or statements[0].type not in reads:
            raise ConfigurationError("sql takes one statement that reads, such as select * from success")
        for name, table in _tables(store, runs).items():
            connection.register(name, table)
        for name, (_about, text) in VIEWS.items():
            connection.execute(f"create view {name} as {text}")
        # Nothing of this machine, nor settings, may be reached from the query.
        connection.execute("set lock_configuration = true")
        found = connection.execute(statements[0])
        return Answer(tuple(column[0] for column in found.description or ()), found.fetchall())
    except duckdb.Error as error:
        raise ConfigurationError(f"the query cannot be answered: {' '.join(str(error).split())}") from error
    finally:
        connection.close()


def _tables(store: Store, runs: Sequence[str] | None) -> dict[str, Any]:
    """Every table as an Arrow data set of the files that current manifests name."""
    from pyarrow import dataset, fs

    held = manifests.runs_of(store)
    current = [one for run in held if runs is None or run in runs if (one := manifests.newest(store, run))]
    if not current:
        raise ConfigurationError(
            f"{store.url} holds no archive of {'any run' if runs is None else ', '.join(runs)}; make one with "
            f"`rollstream archive`"
        )
    if isinstance(store, FsspecStore):
        files, place = fs.PyFileSystem(fs.FSSpecHandler(store.files)), store.path
    else:
        assert isinstance(store, LocalStore)
        root = store.root
        files, place = fs.LocalFileSystem(), lambda name: str(root / name)
    found: dict[str, Any] = {}
    for name, schema in SCHEMAS.items():
        paths = [place(file.path) for manifest in current for file in manifest.of(name)]
        # Data sets infer columns from folders only where they are told to: files hold all of theirs.
        found[name] = (
            dataset.dataset(paths, schema=schema, format="parquet", filesystem=files)
            if paths
            else pa.Table.from_batches([], schema=schema)
        )
    return found
