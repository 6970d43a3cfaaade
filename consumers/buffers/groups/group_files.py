"""Sealed groups as Parquet files: one file for each group, one row for each rollout, in columns for SQL.

A rollout is restored bit for bit, because its row also contains the record as it is on the log.
"""

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pyarrow as pa

from rollstream.consumers.buffers.storage.checked_parquet import read_table, write_table
from rollstream.topics.errors import RecordError
from rollstream.topics.files.atomic_files import StoreError
from rollstream.topics.records import Rollout, Turn
from rollstream.topics.wire.codec import decode_as, encode
from rollstream.topics.wire.rl_examples import Source

COLUMNS = pa.schema(
    [
        ("group_id", pa.string()),
        ("environment", pa.string()),
        ("example_id", pa.string()),
        ("policy_version", pa.int64()),
        ("sealed_ts", pa.float64()),
        ("group_metadata_json", pa.string()),
        ("replica_id", pa.string()),
        ("rollout_uid", pa.string()),
        ("rollout_reward", pa.float64()),
        ("turns_json", pa.string()),
        ("rr_metadata_json", pa.string()),
        ("created_ts", pa.float64()),
    ]
)
"""Columns of a file of groups. `sealed_ts` and `created_ts` are seconds since the Unix epoch; `rr_metadata_json`
contains a rollout's metadata, its place in the log (`source`: partition, offset), and the Avro frame of the record in
base64 (`record`)."""
VIEW_STATE = "position.journal"
"""Name of the state file of a store of all environments, next to their folders."""
_FOLDER_LIMIT = 200


class PlacedRollout(NamedTuple):
    """A rollout and its source."""

    rollout: Rollout
    source: Source


@dataclass(frozen=True, kw_only=True)
class RolloutGroup:
    """A group of rollouts, as it is on disk."""

    group_id: str
    """Hash of its content, see `group_id_of`."""
    environment: str
    example_id: str
    policy_version: int
    members: tuple[PlacedRollout, ...]
    """In order of arrival."""
    sealed_ts: float
    """Time of sealing, seconds since the Unix epoch."""
    metadata: Mapping[str, Any]
    """num_rollouts, uids and replicas (numbers of rollouts by replica)."""

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        return tuple(member.rollout for member in self.members)


def group_id_of(environment: str, example_id: str, policy_version: int, uids: Iterable[str]) -> str:
    """The id of a group: SHA-1 of the arguments as compact JSON with sorted uids, 40 hexadecimal digits."""
    content = json.dumps(
        [environment, example_id, policy_version, sorted(uids)], ensure_ascii=False, separators=(",", ":")
    )
    return hashlib.sha1(content.encode(), usedforsecurity=False).hexdigest()


def group_of(members: Sequence[PlacedRollout], sealed_ts: float) -> RolloutGroup:
    """A sealed group of at least one rollout."""
    first = members[0].rollout
    uids = [member.rollout.uid for member in members]
    group_key = (first.environment, first.example_id, first.policy_version)
    return RolloutGroup(
        group_id=group_id_of(*group_key, uids),
        environment=first.environment,
        example_id=first.example_id,
        policy_version=first.policy_version,
        members=tuple(members),
        sealed_ts=sealed_ts,
        metadata={
            "num_rollouts": len(members),
            "uids": uids,
            "replicas": dict(Counter(member.rollout.metadata.replica_id for member in members)),
        },
    )


def folder_of(environment: str) -> str:
    """Name of the folder of an environment's files: its name, with %XX for characters that file systems refuse."""
    name = quote(environment, safe=" ")
    if name.startswith(".") or name == VIEW_STATE:
        name = f"%{ord(name[0]):02X}{name[1:]}"
    if len(name) > _FOLDER_LIMIT:
        name = f"{name[:_FOLDER_LIMIT]}-{hashlib.sha1(environment.encode(), usedforsecurity=False).hexdigest()}"
    return name


def part_name(group_id: str) -> str:
    """Name of a sealed group's file, `part-{uuid}.parquet`, a function of the group id."""
    digits = group_id[:32]
    return f"part-{'-'.join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:32]))}.parquet"


def write_group(path: Path, group: RolloutGroup, compression: str) -> None:
    """Write a group as a file, atomically. Raises StoreError with its cause."""
    write_table(path, pa.Table.from_pylist(list(_rows(group)), COLUMNS), compression)


def read_group(path: Path) -> RolloutGroup:
    """Read the group of a file. Raises FileNotFoundError, or StoreError if it is not a valid file of a group."""
    try:
        return _group(read_table(path, COLUMNS.names).to_pylist())
    except (FileNotFoundError, StoreError):
        raise
    except (pa.ArrowException, OSError, RecordError, ValueError, LookupError, TypeError) as error:
        raise StoreError(
            f"{path} is not a valid file of a group ({error}); restore it from a copy, or move it away if it does not "
            "belong to this store"
        ) from error


def _group(rows: Sequence[Mapping[str, Any]]) -> RolloutGroup:
    first = rows[0]
    return RolloutGroup(
        group_id=first["group_id"],
        environment=first["environment"],
        example_id=first["example_id"],
        policy_version=first["policy_version"],
        members=tuple(_placed(row) for row in rows),
        sealed_ts=first["sealed_ts"],
        metadata=json.loads(first["group_metadata_json"]),
    )


def _placed(row: Mapping[str, Any]) -> PlacedRollout:
    metadata = json.loads(row["rr_metadata_json"])
    rollout = decode_as(Rollout, base64.b64decode(metadata["record"]))
    partition, offset = metadata["source"]
    return PlacedRollout(rollout, Source(partition, offset, rollout.uid))


def _rows(group: RolloutGroup) -> Iterable[dict[str, Any]]:
    metadata = json.dumps(group.metadata, ensure_ascii=False)
    for rollout, source in group.members:
        yield {
            "group_id": group.group_id,
            "environment": group.environment,
            "example_id": group.example_id,
            "policy_version": group.policy_version,
            "sealed_ts": group.sealed_ts,
            "group_metadata_json": metadata,
            "replica_id": rollout.metadata.replica_id,
            "rollout_uid": rollout.uid,
            "rollout_reward": rollout.reward,
            "turns_json": json.dumps([_turn(turn, rollout) for turn in rollout.turns], ensure_ascii=False),
            "rr_metadata_json": json.dumps(
                {
                    "worker_id": rollout.metadata.worker_id,
                    "weight_step": rollout.metadata.weight_step,
                    "truncated": rollout.truncated,
                    "reward_components": dict(rollout.reward_components),
                    "tokens": len(rollout.tokens),
                    "extra": dict(rollout.extra),
                    "source": [source.partition, source.offset],
                    "record": base64.b64encode(encode(rollout)).decode(),
                },
                ensure_ascii=False,
            ),
            "created_ts": rollout.metadata.timestamp,
        }


def _turn(turn: Turn, rollout: Rollout) -> dict[str, Any]:
    span = slice(turn.start, turn.stop)
    return {
        "message": turn.text,
        "role": turn.role,
        "tokens": rollout.tokens[span].tolist(),
        "logprobs": rollout.logprobs[span].tolist() if turn.has_logprobs else None,
        "reward": turn.reward,
        "inference_metadata": {
            "model_version": turn.inference.model_version,
            "sampling_params": dict(turn.inference.sampling_params),
            "inference_time": turn.inference.inference_time_s,
        },
        "timestamp": turn.timestamp,
    }
