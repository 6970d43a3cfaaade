"""Collects the facts of a run for its report from its index, its ledger and its configuration."""

import hashlib
import math
import sqlite3
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rollstream.pipeline.audit.ledger import ledger
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.index import rollout_query
from rollstream.pipeline.index.evaluations import VERSIONS
from rollstream.pipeline.index.evaluations import evaluations as evaluations_of
from rollstream.pipeline.index.indexed_run import RolloutPlace
from rollstream.pipeline.index.run_index import RunIndex
from rollstream.pipeline.index.series import drops, series, weights
from rollstream.pipeline.report.line_chart import Curve
from rollstream.pipeline.run_settings import ChangedSetting, changed_settings
from rollstream.topics.errors import TopicError
from rollstream.topics.records import PolicyManifest
from rollstream.topics.wire.codec import decode_as

EXAMPLES = 3
"""Number of best rollouts in a report, and of worst rollouts."""
_STEPS = 10_000
_NEWEST_VERSIONS = 12
_STRETCHES = 40
_LOOKED_AT = 200


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Everything that a report shows."""

    run: str
    source: str
    """"topics", or the address of the archive."""
    written_s: float
    """When the report was made, seconds since the Unix epoch."""
    learner: str | None
    learners: Sequence[str]
    environments: Sequence[str]
    configuration: str
    """SHA-256 of the configuration that the processes of the run used; empty if this machine lacks its file."""
    settings: Sequence[ChangedSetting]
    """Settings of that configuration that differ from the defaults."""
    model: Mapping[str, Any]
    """Shape of the model, according to the newest manifest; empty if its description is no JSON object."""
    parameters: int
    evaluations: Mapping[str, Any]
    """As the page lists them."""
    curves: Mapping[str, Curve]
    """Curves by their names on the page of a run."""
    fates: Mapping[str, int]
    drops: Mapping[str, int]
    ledger: Mapping[str, Any] | None
    """As `rollstream ledger --json` prints it; None for an archive, which the ledger does not read."""
    groups: int
    zero_variance: int
    """Number of groups whose members all have the same reward."""
    spread: Curve | None
    """Share of groups of zero variance, by policy version."""
    versions: int
    """Number of policy versions on record."""
    version_bytes: int
    newest_versions: Sequence[Mapping[str, Any]]
    """As the page lists them."""
    best: Sequence[Mapping[str, Any]]
    """Details of the rollouts with the highest rewards."""
    worst: Sequence[Mapping[str, Any]]
    first_ms: int | None = None
    last_ms: int | None = None


def facts_of(config: RunConfig, archive: str = "") -> RunFacts:
    """Collect the facts of a run from its topics, or from an archive.

    Raises the errors of `RunIndex.open`, and DeadlineExceeded if the index is not filled.
    """
    with RunIndex.open(config, archive) as index:
        index.catch_up()
        db = index.db
        figures, values = series(db, points=_STEPS), rollout_query.facets(db)
        newest = db.execute("select value from policies order by version desc limit 1").fetchone()
        manifest = decode_as(PolicyManifest, newest[0]) if newest else None
        best, worst = (_examples(index, order) for order in ("desc", "asc"))
        first_ms, last_ms = db.execute("select min(time_ms), max(time_ms) from rollouts").fetchone()
        spread = _spread(db)
        evaluations = evaluations_of(db, figures["learner"], VERSIONS)
        dropped, versions = drops(db, buckets=1)["totals"], weights(db)["versions"]
    consumer_groups = config.grouper.group_id(config.run), config.labeling.group_id(config.run)
    book = None if archive else ledger(config.kafka, config.run, *consumer_groups)
    if book is not None:
        dropped = book.dropped
    return RunFacts(
        run=config.run,
        source=archive or "topics",
        written_s=time.time(),
        learner=figures["learner"],
        learners=figures["learners"],
        environments=values["environments"],
        configuration=_digest(config.run_dir / "run.toml"),
        settings=changed_settings(config) or (),
        model=_shape(manifest.model) if manifest else {},
        parameters=sum(math.prod(tensor.shape) for tensor in manifest.tensors) if manifest else 0,
        evaluations=evaluations,
        curves={s["name"]: Curve(s["name"], s["x"], s["y"]) for s in figures["series"] if s["x"]},
        fates=values["fates"],
        drops=dropped,
        ledger=book.as_dict() if book is not None else None,
        groups=sum(groups for _version, groups, _zero in spread),
        zero_variance=sum(zero for _version, _groups, zero in spread),
        spread=_spread_curve(spread),
        versions=len(versions),
        version_bytes=sum(version["bytes"] for version in versions),
        newest_versions=versions[:_NEWEST_VERSIONS],
        best=best,
        worst=worst,
        first_ms=first_ms,
        last_ms=last_ms,
    )


def _digest(path: Path) -> str:
    with suppress(OSError):
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return ""


def _shape(text: str) -> Mapping[str, Any]:
    """Return the description of a model; trainers may put any text there."""
    with suppress(msgspec.DecodeError, RecursionError):
        model = msgspec.json.decode(text)
        if isinstance(model, dict):
            return model
    return {}


def _spread(db: sqlite3.Connection) -> list[tuple[int, int, int]]:
    """Return version, number of groups and number with zero variance, counting only groups of two or more."""
    rows = db.execute(
        "select version, count(*), sum(zero_variance) from groups where members > 1 and version is not null"
        " group by version order by version"
    )
    return [(version, groups, zero) for version, groups, zero in rows]


def _spread_curve(spread: Sequence[tuple[int, int, int]]) -> Curve | None:
    """Return shares over at most 40 ranges of versions, because a single version has few groups."""
    each = -(-len(spread) // _STRETCHES) or 1
    stretches = [spread[begin : begin + each] for begin in range(0, len(spread), each)]
    if not stretches:
        return None
    shares = [sum(zero for *_, zero in rows) / sum(groups for _version, groups, _zero in rows) for rows in stretches]
    return Curve("zero variance", [rows[-1][0] for rows in stretches], shares)


def _examples(index: RunIndex, order: str) -> list[Mapping[str, Any]]:
    """Return details of rollouts with the highest or lowest rewards: one of a group; of equal rewards, the newest."""
    rows = index.db.execute(
        "select partition, offset, grp from rollouts where reward is not null"
        f" order by reward {order}, id desc limit {_LOOKED_AT}"
    )
    examples: list[Mapping[str, Any]] = []
    seen: set[int | None] = set()
    for partition, offset, group in rows.fetchall():
        if group in seen or len(examples) == EXAMPLES:
            continue
        with suppress(TopicError):  # The record is no longer on the log.
            examples.append(index.details(RolloutPlace(partition, offset)))
            seen.add(group)
    return examples
