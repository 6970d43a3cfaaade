"""Judges a run from its topics alone, sharing no code with the consumers: what they promise, worked out a second time.

Conservation (every offset of rollouts in exactly one place), exactly once, whole and pure groups with the advantages
the formula gives, digests, and batches that are what this auditor's own model of grouping would have cut.
"""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from blake3 import blake3

from tests.faults.evidence import Decoded, Evidence, Raw, collect, decode, signed_by
from tests.faults.findings import Audit, Batch
from tests.faults.model import GIVEN, NotModelled, refold
from tests.faults.purity import check_groups

_LONGEST_NAME = 512
"""Longer names are cut in the journal."""
READABLE_BYTES = 8 * 1024 * 1024
"""Values up to the record limit can always be read."""


def audit(bootstrap_servers: str, run: str, *, group: str = "grouper") -> Audit:
    """Read a run that has come to rest and judge it."""
    return judge(collect(bootstrap_servers, run, group=group))


@dataclass
class _Journal:
    """Sums over the journal of one partition."""

    position: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    clock: int = -1
    finished: dict[int, str] = field(default_factory=dict)
    drops: dict[int, str] = field(default_factory=dict)
    in_flight: set[int] = field(default_factory=set)
    batch_ids: list[str] = field(default_factory=list)
    skipped: set[int] = field(default_factory=set)
    """Offsets that became dead letters without being decoded, since somebody asked for it."""
    counts: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    """The newest entry of each environment and fate. A record has those that changed."""


def judge(evidence: Evidence) -> Audit:
    """Judge what was read."""
    result = Audit(produced=len(evidence.topics["rollouts"]))
    rollouts = evidence.by_partition("rollouts")
    batches = _batches(evidence, result)
    journals = {
        number: _journal(number, records, result) for number, records in evidence.by_partition("journal").items()
    }
    for number in rollouts.keys() - journals.keys():
        result.found("conservation", f"partition {number} has records and no journal")
    _check_index(evidence, batches, result)
    _check_numbers(batches, journals, result)
    dead = _dead_letters(evidence, result)
    for number, journal in sorted(journals.items()):
        records = rollouts.get(number, [])
        own = [batch for batch in batches if batch.record["partition"] == number]
        if evidence.committed.get(number) != journal.position:
            result.found(
                "exactly once",
                f"partition {number}: offset {evidence.committed.get(number)} is committed, the journal is at "
                f"{journal.position}",
            )
        _check_places(number, records, own, journal, dead[number], result)
        _check_counts(number, records, journal, result)
        records = [replace(raw, value=None) if raw.offset in journal.skipped else raw for raw in records]
        try:
            check_groups(records, own, _configurations(number, records, journal), result)
        except NotModelled as reason:
            result.not_modelled[number] = str(reason)
            continue
        # Nobody saw the time of a record that could not be read.
        timeless = {offset for partition, offset in _unread_times(evidence) if partition == number}
        timed = [replace(raw, timestamp_ms=-1) if raw.offset in timeless else raw for raw in records]
        _check_refold(number, timed, own, journal, result)
    return result


def _unread_times(evidence: Evidence) -> Iterator[tuple[int, int]]:
    for letter in filter(_unreadable, evidence.topics["dead-letters"]):
        headers = letter.headers
        yield int(headers["__streams.errors.partition"] or b""), int(headers["__streams.errors.offset"] or b"")


# ---------------------------------------------------------------------- reading the outputs


def _batches(evidence: Evidence, result: Audit) -> list[Batch]:
    collected = []
    for raw in evidence.topics["batches"]:
        record = decode(raw.value)
        if record is None or record.name != "TrainingBatch":
            result.found("digest", f"batches[{raw.partition}] offset {raw.offset} is no TrainingBatch")
            continue
        batch = Batch(raw, record)
        collected.append(batch)
        result.batches += 1
        if record["partition"] != raw.partition:
            result.found("exactly once", f"batch {batch.name} lies on partition {raw.partition}")
        if digest_of(raw.value) != record["digest"]:
            result.found("digest", f"batch {batch.name} does not hash to the digest it carries")
    return collected


def digest_of(value: bytes) -> str:
    """Digest over a batch's record without a registry's prefix, up to its last field: the length and 64 characters."""
    return blake3(value[5 if value[:1] == b"\0" else 0 : -66]).hexdigest()


def _journal(number: int, records: list[Raw], result: Audit) -> _Journal:
    journal = _Journal()
    parts: list[Decoded] = []
    for sequence, raw in enumerate(records):
        record = decode(raw.value)
        if record is None or record.name != "JournalRecord":
            result.found("conservation", f"journal[{number}] offset {raw.offset} is no JournalRecord")
            continue
        if sequence == 0:
            journal.config = json.loads(record["watermark_configuration"])
            journal.clock = record["policy_version"]
        if (record["sequence"], record["begin"]) != (sequence, journal.position):
            result.found(
                "exactly once",
                f"journal[{number}] sequence {record['sequence']} begins at {record['begin']}, sequence {sequence} at "
                f"{journal.position} was due",
            )
        journal.position = record["position"]
        part, part_count = record["part"], record["parts"]
        if part != len(parts) or {one["position"] for one in parts} - {record["position"]}:
            result.found(
                "exactly once",
                f"journal[{number}] sequence {sequence} is part {part} of {part_count} after {len(parts)} others",
            )
        parts.append(record)
        if part == part_count - 1:
            _transaction(number, parts, journal, result)
            parts = []
    if parts:
        result.found("exactly once", f"journal[{number}] ends in the middle of a transaction")
    return journal


def _transaction(number: int, parts: list[Decoded], journal: _Journal, result: Audit) -> None:
    """Add what one transaction changed; its lists may extend over several records."""
    for record in parts:
        journal.in_flight.update(_offsets(record["admitted"]))
    for record in parts:
        for finished in record["finished"]:
            for offset in _offsets(finished["runs"]):
                if offset in journal.finished:
                    result.found("exactly once", f"rollouts[{number}] offset {offset} finishes twice in the journal")
                journal.finished[offset] = finished["fate"]
                journal.in_flight.discard(offset)
        for drop in record["drops"]:
            journal.drops[drop["offset"]] = drop["reason"]
        journal.batch_ids += record["batch_ids"]
        journal.skipped.update(record["skipped"])
    if parts[-1]["snapshot"] and {o for record in parts for o in _offsets(record["unfinished"])} != journal.in_flight:
        where = f"journal[{number}] sequence {parts[-1]['sequence']}"
        result.found("conservation", f"the snapshot at {where} is not what adds up")
    counted = sum(count["rollouts"] for count in journal.counts.values())
    journal.counts.update(((count["environment"], count["fate"]), count) for count in parts[-1]["counts"])
    grown = sum(count["rollouts"] for count in journal.counts.values()) - counted
    over = sum(len(_offsets(finished["runs"])) for record in parts for finished in record["finished"])
    if grown != over:
        where = f"journal[{number}] sequence {parts[-1]['sequence']}"
        result.found("conservation", f"the counts at {where} grow by {grown}, and {over} offsets finish")


def _offsets(runs: Iterable[Any]) -> list[int]:
    numbers = [int(number) for number in runs]
    return [first + n for first, count in zip(numbers[::2], numbers[1::2], strict=True) for n in range(count)]


def _dead_letters(evidence: Evidence, result: Audit) -> dict[int, list[int]]:
    """Offsets dead-lettered, by partition of their source; each must carry what was sent."""
    sources = {(raw.partition, raw.offset): raw for raw in evidence.topics["rollouts"]}
    actual: dict[int, list[int]] = defaultdict(list)
    for raw in evidence.topics["dead-letters"]:
        topic = raw.headers.get("__streams.errors.topic") or b""
        if "rollstream.redriven" in raw.headers or topic.endswith((b".unlabelled", b".calls")):
            continue
        try:
            number = int(raw.headers["__streams.errors.partition"] or b"")
            offset = int(raw.headers["__streams.errors.offset"] or b"")
            source = sources[number, offset]
        except (KeyError, ValueError):
            result.found("conservation", f"the dead letter at offset {raw.offset} names no record of rollouts")
            continue
        actual[number].append(offset)
        if not _is_what_was_sent(raw, source):
            result.found("conservation", f"the dead letter of rollouts[{number}] offset {offset} is not what was sent")
    return actual


def _is_what_was_sent(letter: Raw, source: Raw) -> bool:
    """The same bytes, or their digest if they are too large, or nothing if they are too large when decompressed."""
    if _unreadable(letter):
        return letter.value is None and letter.key is None and len(source.value or b"") > READABLE_BYTES
    digest = letter.headers.get("rollstream.value.sha256")
    if digest is None:
        return (letter.key, letter.value) == (source.key, source.value)
    return letter.key == source.key and digest == hashlib.sha256(source.value or b"").hexdigest().encode()


def _unreadable(letter: Raw) -> bool:
    return (letter.headers.get("__streams.errors.message") or b"").startswith(b"its batch cannot be decompressed")


# ---------------------------------------------------------------------- exactly once


def _check_index(evidence: Evidence, batches: list[Batch], result: Audit) -> None:
    """The index has one entry for each batch, and what the entry says is true."""
    lying = {(batch.raw.partition, batch.raw.offset): batch for batch in batches}
    indexed: Counter[tuple[int, int]] = Counter()
    last: dict[int, int] = {}
    for raw in evidence.topics["batch-index"]:
        entry = decode(raw.value)
        if entry is None or entry.name != "BatchIndexEntry":
            result.found("exactly once", f"batch-index offset {raw.offset} is no entry")
            continue
        place = (entry["partition"], entry["offset"])
        indexed[place] += 1
        batch = lying.get(place)
        if batch is None or batch.name != entry["batch_id"]:
            result.found("exactly once", f"the index names {entry['batch_id']} at {place}, where it is not")
            continue
        record = batch.record
        true = {
            "rollouts": len(record["uids"]),
            "tokens": len(record["tokens"]),
            "trained_tokens": int(np.count_nonzero(record["loss_mask"])),
            "lowest_version": int(record["lowest_versions"].min()),
            "highest_version": int(record["highest_versions"].max()),
            "digest": record["digest"],
        }
        wrong = [name for name, value in true.items() if entry[name] != value]
        if wrong:
            result.found("exactly once", f"the index says of {batch.name} another {', '.join(wrong)}")
        if record["number"] <= last.get(place[0], -1):
            result.found("exactly once", f"the index names {batch.name} after a later batch of its partition")
        last[place[0]] = max(last.get(place[0], -1), record["number"])
    for place, batch in lying.items():
        if indexed[place] != 1:
            result.found("exactly once", f"batch {batch.name} at {place} is in the index {indexed[place]} times")


def _check_numbers(batches: list[Batch], journals: dict[int, _Journal], result: Audit) -> None:
    """Each batch is there once, and they are counted without a gap, as the journal says."""
    for name, times in Counter(batch.name for batch in batches).items():
        if times > 1:
            result.found("exactly once", f"batch {name} is there {times} times")
    for number, journal in journals.items():
        names = [batch.name for batch in batches if batch.record["partition"] == number]
        if names != [f"{number}-{count}" for count in range(len(names))]:
            result.found("exactly once", f"batches of partition {number} are not numbered 0 to {len(names) - 1}")
        if names != journal.batch_ids:
            differing = sorted(set(names) ^ set(journal.batch_ids))
            result.found("exactly once", f"journal[{number}] names other batches than there are: {differing[:5]}")


# ---------------------------------------------------------------------- conservation


def _check_places(
    number: int, records: list[Raw], batches: list[Batch], journal: _Journal, dead: list[int], result: Audit
) -> None:
    """Every record in exactly one place, every place with a record."""
    places: dict[int, list[str]] = defaultdict(list)
    for batch in batches:
        for offset in batch.offsets:
            places[offset].append("batched")
    for offset, reason in journal.drops.items():
        places[offset].append(f"dropped:{reason}")
    for offset in dead:
        places[offset].append("dead letter")
    for offset, fate in journal.finished.items():
        if fate == "control":
            places[offset].append("control")
    for offset in journal.in_flight:
        places[offset].append("in flight")
    for raw in records:
        if raw.offset >= journal.position:
            places[raw.offset].append("unread")
        actual = places.pop(raw.offset, [])
        if len(actual) != 1:
            where = " and ".join(actual) or "nowhere"
            result.found("conservation", f"rollouts[{number}] offset {raw.offset} is {where}")
        result.places.update(actual)
        report = journal.finished.get(raw.offset, "in flight" if raw.offset < journal.position else "unread")
        if actual and actual[0].partition(":")[0].replace("dead letter", "dead_lettered") != report:
            result.found(
                "conservation", f"rollouts[{number}] offset {raw.offset} is {actual[0]}, the journal says {report}"
            )
    for offset, actual in sorted(places.items()):
        result.found("conservation", f"rollouts[{number}] offset {offset} is {' and '.join(actual)}, and no record")


def _check_counts(number: int, records: list[Raw], journal: _Journal, result: Audit) -> None:
    """Counts and sums of rollouts in the journal, by environment and fate."""
    if any(environment == "(others)" for environment, _fate in journal.counts):
        return
    true: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0] * 6)
    for raw in records:
        fate = journal.finished.get(raw.offset)
        record = decode(raw.value)
        if fate not in ("batched", "dropped") or record is None:
            continue
        reason = journal.drops.get(raw.offset)
        if record.name != "Rollout":
            # Other records that are dropped count as one each; only a cancellation has an environment.
            environment = record["environment"] if record.name == "GroupCancelled" else ""
            true[_short(environment), f"{fate}:{reason}"][0] += 1
            continue
        sums = true[_short(record["environment"]), fate if reason is None else f"{fate}:{reason}"]
        length, reward = int(np.count_nonzero(record["loss_mask"])), record["reward"]
        # An invalid record may hold values that are no numbers.
        measured = [0.0] * 4 if reason == "invalid" else [length, length * length, reward, reward * reward]
        sums[:] = [a + b for a, b in zip(sums, [1, len(record["tokens"]), *measured], strict=True)]
    names = ("rollouts", "tokens", "sampled_tokens", "sampled_tokens_squared", "reward", "reward_squared")
    given = {
        key: [float(count[name]) for name in names]
        for key, count in journal.counts.items()
        if key[1] == "batched" or key[1].startswith("dropped:")
    }
    for key in sorted(true.keys() | given.keys()):
        there, due = (counts.get(key, [0.0] * 6) for counts in (given, true))
        if not np.allclose(there, due, rtol=1e-9):
            sums_of = dict(zip(names, zip(there, due, strict=True), strict=True))
            result.found("conservation", f"journal[{number}] counts of {key} (there, due): {sums_of}")


def _short(name: str) -> str:
    """A name as the journal has it: longer ones are cut, with a mark for it."""
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"


# ---------------------------------------------------------------------- refold


def _configurations(number: int, records: list[Raw], journal: _Journal) -> dict[int, dict[str, Any]]:
    """Configurations by the offset from which they held: the first, and each mark's of a higher generation.

    If there are keys for marks, one of those in force must have signed the mark for this partition.
    """
    collected = {-1: journal.config}
    generation = journal.config.get("generation", 0)
    keys = journal.config.get("mark_keys", ())
    context = b"rollstream mark\0" + number.to_bytes(4, "big")
    for raw in records:
        mark = decode(raw.value)
        if raw.offset >= journal.position or mark is None or mark.name != "Mark" or mark["kind"] != "configuration":
            continue
        if mark["generation"] > generation and (not keys or signed_by(raw.value, keys, context)):
            generation = mark["generation"]
            collected[raw.offset] = json.loads(mark["configuration"])
            keys = collected[raw.offset].get("mark_keys", ())
    return collected


def _check_refold(number: int, records: list[Raw], batches: list[Batch], journal: _Journal, result: Audit) -> None:
    """Batches and drops are what the model makes of the same records."""
    given = {offset: reason for offset, reason in journal.drops.items() if reason in GIVEN}
    try:
        expected = refold(records, journal.position, journal.config, journal.clock, given)
    except NotModelled as reason:
        result.not_modelled[number] = str(reason)
        return
    result.refolded.append(number)
    cut = [(batch.record["cut"], batch.offsets) for batch in batches]
    for count, (there, due) in enumerate(zip(cut, expected.batches, strict=False)):
        if there != due:
            result.found("refold", f"batch {number}-{count} is {there}, the model cuts {due}")
            break
    if len(cut) != len(expected.batches):
        result.found("refold", f"partition {number} has {len(cut)} batches, the model cuts {len(expected.batches)}")
    for offset in sorted(journal.drops.keys() | expected.drops.keys()):
        there, due = journal.drops.get(offset), expected.drops.get(offset)
        if there != due:
            result.found("refold", f"rollouts[{number}] offset {offset} is dropped for {there}, by the model for {due}")
    if journal.in_flight != expected.in_flight:
        differing = sorted(journal.in_flight ^ expected.in_flight)
        result.found("refold", f"rollouts[{number}] offsets {differing[:5]} are in flight here and not there")
