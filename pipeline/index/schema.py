"""The tables of the SQLite file of an index. The file can be deleted at any time, and is then built again.

The tables of places say where the topics hold each rollout, the record of its fate, its batch, step and version; the
tables of rows hold everything else that the page of a run shows. Each of these two layers has positions of its own.
"""

import sqlite3
from collections.abc import Mapping
from pathlib import Path

from rollstream.pipeline.index import sqlite_files

VERSION = 8
"""Version of the tables and of their contents; raise it with each change of either."""
_TEXTS_HELD = 64 * 1024 * 1024
"""Bytes of new entries that the full-text index keeps in memory before it writes them; a smaller value makes many small
parts, which are merged again and again."""
PLACES, ROWS = "places", "rows"
"""The layers of an index."""
_PLACES = """
create table positions (
    layer text, topic text, partition integer, position integer not null, last_ms integer not null default 0,
    repeated integer not null default 0, primary key (layer, topic, partition)
) without rowid;
create table places (
    uid integer, partition integer, offset integer, primary key (uid, partition, offset)
) without rowid;
create table finished (
    partition integer, first integer, last integer not null, journal integer not null, primary key (partition, first)
) without rowid;
create table journals (
    partition integer primary key, begin integer not null, position integer not null, sequence integer not null,
    history text not null
);
create table entries (
    batch text primary key, partition integer not null, offset integer not null, lowest integer not null,
    highest integer not null, value blob not null
) without rowid;
create index entries_by_partition on entries (partition, offset);
create index entries_by_version on entries (highest, lowest);
create table steps (
    learner text, step integer, version integer not null, time_ms integer not null, value blob not null,
    primary key (learner, step)
);
create index steps_by_number on steps (step);
create index steps_by_version on steps (version);
create table uses (
    batch text, learner text, step integer, part integer, trained integer not null, reason text not null,
    row_numbers text not null, primary key (batch, learner, step, part)
) without rowid;
create index uses_by_step on uses (learner, step);
create table policies (
    version integer primary key, learner text, step integer, kind text, bytes integer, created_ms integer,
    digest text, seconds real, value blob not null
);
create table skipped (
    topic text, partition integer, records integer not null, offset integer not null, error text not null,
    primary key (topic, partition)
) without rowid;
create table refused (error text primary key) without rowid;
"""
_ROWS = f"""
create table names (id integer primary key, kind text not null, name text not null, unique (kind, name));
create table rollouts (
    id integer primary key, partition integer not null, offset integer not null, time_ms integer not null,
    environment integer, worker integer, version integer, lowest integer, highest integer, reward real,
    length integer, sampled integer, truncated integer, fate integer not null, reason integer, batch integer,
    batch_row integer, step integer, advantage real, grp integer
);
create unique index rollouts_by_place on rollouts (partition, offset);
create index rollouts_by_environment on rollouts (environment, id);
create index rollouts_by_worker on rollouts (worker, id);
create index rollouts_by_version on rollouts (version, id);
create index rollouts_by_fate on rollouts (fate, id);
create index rollouts_by_reason on rollouts (fate, reason, id);
create index rollouts_by_reward on rollouts (reward, id);
create index rollouts_by_length on rollouts (length, id);
create index rollouts_by_advantage on rollouts (advantage, id) where advantage is not null;
create index rollouts_by_group on rollouts (grp);
create index rollouts_by_batch on rollouts (batch) where batch is not null;
create index rollouts_by_step on rollouts (step, id) where step is not null;
create table row_count (rows integer not null);
insert into row_count values (0);
create table rollout_names (
    id integer primary key, uid text, example text, preview text not null, episode text, branches integer
);
create index rollouts_by_example on rollout_names (example);
create virtual table texts using fts5 (text, content='', tokenize='trigram');
insert into texts (texts, rank) values ('hashsize', {_TEXTS_HELD});
create table groups (
    id integer primary key, name text not null unique, environment integer, example text, version integer,
    declared integer, members integer not null default 0, mean real, std real, lowest real, highest real,
    zero_variance integer not null default 0, fate integer, time_ms integer, first integer
);
create index groups_by_first on groups (first);
create index groups_by_std on groups (std, first);
create table settled (partition integer primary key, position integer not null, sequence integer not null);
create table batches (
    id integer primary key, name text not null unique, partition integer, offset integer, rollouts integer,
    cut_ms integer
);
create table step_metrics (learner text, name text, step integer, value real, primary key (learner, name, step))
    without rowid;
create table components (
    component text primary key, role text not null, time_ms integer not null, "values" text not null
) without rowid;
create table component_series (
    role text, name text, bucket integer, component text, value real, primary key (role, name, bucket, component)
) without rowid;
create table produced (
    partition integer, version integer, environment integer, rollouts integer not null, reward real not null,
    successes integer not null, length real not null, sampled real not null, truncated integer not null,
    primary key (partition, version, environment)
) without rowid;
create table evaluated (
    version integer, environment integer, episode text, reward real not null, success integer not null, phase text,
    example text, samples integer, prompts integer, suites text, primary key (version, environment, episode)
) without rowid;
"""


def full_identity(source: Mapping[str, str]) -> dict[str, str]:
    """Return the identity of the index of a source: its own, and the version of the tables."""
    return {"version": str(VERSION), **source}


def create(path: Path, identity: Mapping[str, str]) -> sqlite3.Connection:
    """Open the index for writing; an index of other topics or of another version is deleted and created anew."""
    return sqlite_files.create(path, full_identity(identity), _PLACES + _ROWS)
