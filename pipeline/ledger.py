"""The conservation proof: every record of `rollouts` is in exactly one place, read from the topics alone.

The cut: steps first, then the position each partition's group committed last, then the journal up to the records it
names, and batches and dead letters up to those. What lies beyond is unread; whatever does not add up is a problem,
named with its partition and offset. What was pruned is known by the journal's cumulative counts.
"""

import contextlib
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import KafkaException, TopicPartition

from consumers.grouping.changes import BATCHED, CONTROL, DEAD_LETTERED, DROPPED
from consumers.grouping.config import GrouperConfig
from consumers.grouping.selection import Selection, selections
from consumers.grouping.state import CommitMetadata
from pipeline.journals import IN_FLIGHT, READ, PartitionJournal, environments
from topics import clients, codec
from topics.catalogue import name_in_run, topic_name
from topics.codec import decode_as
from topics.config import KafkaConfig
from topics.errors import RecordError, StateRefused
from topics.records import BatchUse, JournalRecord, LearnerStep, Rollout, TrainingBatch, batch_numbers

_MOST_PROBLEMS = 20
_PATIENCE_S = 3.0
"""How long what a committed transaction wrote may take to show: it does not on all partitions at once."""
REDRIVEN = "rollstream.redriven"
"""Header of a note in dead-letters: the offset there of the letter that was sent again."""


@dataclass
class Ledger:
    """Where every record of a run is."""

    produced: int = 0
    """Records of rollouts."""
    rollouts: int = 0
    """Rollouts among them."""
    batched: int = 0
    batches: int = 0
    trained: int = 0
    skipped: int = 0
    steps: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    dead_lettered: int = 0
    control: int = 0
    in_flight: int = 0
    unread: int = 0
    evals: int = 0
    """Rollouts made for evaluation."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """Each evaluation: environment, split, phase, version asked for and those that answered, rollouts and means."""
    evals_batched: int = 0
    """Rollouts of batches that are made for evaluation: each is a problem."""
    pruned: int = 0
    """Of all these, records known by the journal's counts alone, as they or the journal's beginning were deleted."""
    environments: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Rollouts and tokens read, by environment and fate; empty where a record named no environment."""
    selection: dict[str, Selection] = field(default_factory=dict)
    """Lengths and rewards by environment, of what was batched and of what was not."""
    problems: list[str] = field(default_factory=list)
    """What does not add up; the first twenty."""

    @property
    def balanced(self) -> bool:
        """Whether every record is in exactly one place and every place agrees with the others."""
        placed = self.batched + sum(self.dropped.values()) + self.dead_lettered + self.control
        return not self.problems and self.produced == placed + self.in_flight + self.unread

    def as_dict(self) -> dict[str, Any]:
        """The ledger as programs read it."""
        return {
            "balanced": self.balanced,
            "produced": self.produced,
            "rollouts": self.rollouts,
            "batched": self.batched,
            "batches": self.batches,
            "trained": self.trained,
            "skipped": self.skipped,
            "steps": self.steps,
            "dropped": dict(sorted(self.dropped.items())),
            "dead_lettered": self.dead_lettered,
            "control": self.control,
            "in_flight": self.in_flight,
            "unread": self.unread,
            "evals": self.evals,
            "evals_batched": self.evals_batched,
            "evaluations": self.evaluations,
            "pruned": self.pruned,
            "tokens": self.tokens,
            "environments": self.environments,
            "selection": {environment: found.as_dict() for environment, found in self.selection.items()},
            "problems": self.problems,
        }

    @property
    def tokens(self) -> dict[str, int]:
        """Tokens of all that was read, by fate; what is unread is not counted."""
        found: Counter[str] = Counter()
        for figures in self.environments.values():
            found.update(figures["tokens"])
        return dict(found)

    def problem(self, text: str) -> None:
        """Note something that does not add up."""
        if len(self.problems) < _MOST_PROBLEMS:
            self.problems.append(text)


def ledger(kafka: KafkaConfig, run: str, group: str | None = None) -> Ledger:
    """Read a run's topics and prove, or disprove, that every record is in one place.

    `group` is the consumer group of the run's grouping processes, where its name is not the usual one.
    """
    clients.check_broker(kafka)
    result = Ledger()
    steps = _read_steps(kafka, run)
    journals = _read_journals(kafka, run, group or GrouperConfig().group_id(run), result)
    result.selection = selections(count for journal in journals.values() for count in journal.counts)
    evals = _read_evals(kafka, run, result)
    rows = _check_batches(kafka, run, journals, evals, result)
    _check_dead_letters(kafka, run, journals, result)
    in_flight = _check_records(kafka, run, journals, result)
    _sum_up(journals, in_flight, result)
    _check_steps(steps, rows, journals, run, result)
    return result


def _read_evals(kafka: KafkaConfig, run: str, result: Ledger) -> set[str]:
    """What was made for evaluation, told by evaluation; its uids. Where one was sent again, the newer counts."""
    newest = {}
    for message in clients.read_to_end(kafka, topic_name(run, "evals")):
        try:
            rollout = decode_as(Rollout, message.value())
        except RecordError as error:
            result.problem(f"evals[{message.partition()}] offset {message.offset()}: {error}")
            continue
        newest[rollout.uid] = rollout
    told: dict[tuple[str, str, str, int], list[Rollout]] = {}
    for rollout in newest.values():
        of = (rollout.environment, rollout.extra.get("split", ""), rollout.extra.get("phase", ""))
        told.setdefault((*of, rollout.policy_version), []).append(rollout)
    result.evaluations += [_evaluation(*of, told[of]) for of in sorted(told)]
    result.evals = len(newest)
    return set(newest)


def _evaluation(environment: str, split: str, phase: str, version: int, rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Figures of one evaluation: the same to the last bit, whichever of its partitions was read first."""
    exact = [r.reward_components["exact"] for r in rollouts if "exact" in r.reward_components]
    return {
        "environment": environment,
        "split": split,
        "phase": phase,
        "version": version,
        "lowest_version": min(r.lowest_version for r in rollouts),
        "highest_version": max(r.highest_version for r in rollouts),
        "rollouts": len(rollouts),
        "prompts": max(int(r.extra.get("prompts", len(rollouts))) for r in rollouts),
        "reward": math.fsum(r.reward for r in rollouts) / len(rollouts),
        "exact": math.fsum(exact) / len(exact) if exact else None,
    }


def _read_steps(kafka: KafkaConfig, run: str) -> list[LearnerStep]:
    """The newest record of each step."""
    newest: dict[tuple[str, int], LearnerStep] = {}
    for message in clients.read_to_end(kafka, topic_name(run, "steps")):
        step = decode_as(LearnerStep, message.value())
        newest[step.learner, step.step] = step
    return list(newest.values())


def _read_journals(kafka: KafkaConfig, run: str, group: str, result: Ledger) -> dict[int, PartitionJournal]:
    """The journal of each partition up to the record its committed offset names; to its end where none is."""
    topic = topic_name(run, "journal")
    partitions = clients.partitions_of(kafka, topic_name(run, "rollouts"))
    cut = _cut(kafka, run, group, partitions)
    journals = {p: PartitionJournal(p, result.problem) for p in range(partitions)}
    follows: dict[int, int] = {}
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        for message in clients.read_to_end(kafka, topic, start=dict(follows)):
            partition, offset = message.partition() or 0, message.offset() or 0
            if offset >= follows.get(partition, 0) and offset <= cut.get(partition, offset):
                record = decode_as(JournalRecord, message.value())
                if partition not in follows and record.sequence > 0 and not clients.bounds(kafka, topic)[partition][0]:
                    result.problem(f"journal[{partition}] begins with sequence {record.sequence}; nothing was pruned")
                journals[partition].read(record)
                follows[partition] = offset + 1
        behind = sorted(p for p, last in cut.items() if follows.get(p, 0) <= last)
        if not behind:
            break
        if time.monotonic() > deadline:
            for partition in behind:
                result.problem(f"journal[{partition}] does not hold offset {cut[partition]}, which group {group} names")
            break
        time.sleep(0.1)
    for journal in journals.values():
        if journal.sequence >= 0 and journal.base < 0:
            result.problem(f"journal[{journal.number}] holds no whole snapshot")
        elif journal.base >= 0:
            journal.check_counts()
    return journals


def _cut(kafka: KafkaConfig, run: str, group: str, partitions: int) -> dict[int, int]:
    """Offset of the newest journal record of each partition, as the group committed it with its position.

    Without those of a transaction that stays open, or where nothing is committed: the journal ends then where it ends.
    """
    consumer = clients.reader(kafka, group=group)
    found = {}
    try:
        wanted = [TopicPartition(topic_name(run, "rollouts"), p) for p in range(partitions)]
        for committed in consumer.committed(wanted, _PATIENCE_S):
            if committed.error is None and committed.offset >= 0:
                # Whoever else committed there is refused by the grouping process; nothing is cut by it.
                with contextlib.suppress(StateRefused):
                    found[committed.partition] = CommitMetadata.decode(committed.metadata, run).journal
    except KafkaException:
        return {}
    finally:
        consumer.close()
    return found


def _check_batches(
    kafka: KafkaConfig, run: str, journals: dict[int, PartitionJournal], evals: set[str], result: Ledger
) -> dict[str, int]:
    """Batches against the journal: the same batches, made of exactly the offsets it calls batched and of nothing that
    was made for evaluation. Rows by batch id.
    """
    expected = {batch_id for journal in journals.values() for batch_id in journal.batch_ids}
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        found = Ledger()
        carried: dict[int, Counter[int]] = {p: Counter() for p in journals}
        rows: dict[str, int] = {}
        oldest: dict[int, int] = {}
        for message in clients.read_to_end(kafka, topic_name(run, "batches")):
            batch = decode_as(TrainingBatch, message.value())
            journal = journals[batch.partition]
            oldest.setdefault(batch.partition, batch.number)
            if batch.number >= journal.batches:
                continue  # Committed after the cut.
            if batch.batch_id in rows:
                found.problem(f"batch {batch.batch_id} is in batches twice")
            rows[batch.batch_id] = len(batch)
            for uid in evals.intersection(batch.uids):
                found.evals_batched += 1
                found.problem(f"rollout {uid} of evals is in batch {batch.batch_id}")
            if batch.batch_id in expected:
                carried[batch.partition].update(batch.source_offsets.tolist())
            elif batch.number >= journal.base_batches:
                found.problem(f"batch {batch.batch_id} is in batches and not in the journal")
        missing = expected - rows.keys()
        deleted = {p for p, (low, _end) in clients.bounds(kafka, topic_name(run, "batches")).items() if low > 0}
        gone = {name for name in missing if batch_numbers(name)[0] in deleted and _is_older(name, oldest)}
        if missing == gone or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    for text in found.problems:
        result.problem(text)
    result.evals_batched = found.evals_batched
    for batch_id in sorted(missing - gone):
        result.problem(f"batch {batch_id} is in the journal and not in batches")
    for number, journal in journals.items():
        in_flight = journal.offsets(IN_FLIGHT)
        named = (journal.offsets(BATCHED) | (journal.delivered & in_flight)) - journal.delivered_before
        batches = carried[number]
        # Which rollouts a deleted batch held, nothing says.
        lost = named - batches.keys() if any(batch_numbers(name)[0] == number for name in gone) else set()
        for offset in sorted((named - lost).symmetric_difference(batches)):
            place = "journal and no batch" if offset in named else "a batch and not the journal"
            result.problem(f"rollouts[{number}] offset {offset} is batched in {place}")
        for offset, times in batches.items():
            if times > 1:
                result.problem(f"rollouts[{number}] offset {offset} is in {times} batches")
    result.batches = sum(journal.batches for journal in journals.values())
    return rows


def _is_older(batch_id: str, oldest: Mapping[int, int]) -> bool:
    """Whether a batch came before all that its partition still holds; `oldest` has the number of the first of them."""
    partition, number = batch_numbers(batch_id)
    return partition not in oldest or number < oldest[partition]


def _check_dead_letters(kafka: KafkaConfig, run: str, journals: dict[int, PartitionJournal], result: Ledger) -> None:
    """Dead letters against the journal. They are never pruned: of those of before its beginning the number must be."""
    wanted = sum(len(journal.offsets(DEAD_LETTERED)) for journal in journals.values())
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        found = Ledger()
        letters = _read_dead_letters(kafka, run, journals, found)
        if sum(map(len, letters.values())) >= wanted or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    for text in found.problems:
        result.problem(text)
    for number, journal in journals.items():
        named, here = journal.offsets(DEAD_LETTERED), letters[number]
        before = {offset for offset in here if journal.settled_before(offset)}
        if len(before) != journal.before[DEAD_LETTERED]:
            result.problem(
                f"rollouts[{number}]: {len(before)} records below offset {journal.base} are in dead-letters, the "
                f"journal counts {journal.before[DEAD_LETTERED]}"
            )
        for offset in sorted(named.symmetric_difference(here.keys() - before)):
            place = "the journal alone" if offset in named else "the topic alone"
            result.problem(f"rollouts[{number}] offset {offset} is dead-lettered in {place}")
        for offset, times in here.items():
            if times > 1:
                result.problem(f"rollouts[{number}] offset {offset} is dead-lettered {times} times")


def _of_rollouts(headers: Mapping[str, Any]) -> bool:
    """Whether a dead letter was in `rollouts`, of this run or of the one it was restored from."""
    source = (headers.get("__streams.errors.topic") or b"rollouts").decode(errors="replace")
    return name_in_run(source) == "rollouts"


def _read_dead_letters(
    kafka: KafkaConfig, run: str, journals: dict[int, PartitionJournal], result: Ledger
) -> dict[int, Counter[int]]:
    found: dict[int, Counter[int]] = {p: Counter() for p in journals}
    for message in clients.read_to_end(kafka, topic_name(run, "dead-letters")):
        headers: dict[str, Any] = dict(message.headers() or [])
        if REDRIVEN in headers:
            continue  # A note that a letter was sent again, which is another record of rollouts.
        if not _of_rollouts(headers):
            continue  # Of trajectories that could not be labelled.
        try:
            number = int(headers["__streams.errors.partition"])
            offset = int(headers["__streams.errors.offset"])
            position = journals[number].position
        except (KeyError, ValueError, TypeError):
            result.problem(f"dead-letters offset {message.offset()} names no partition and offset of rollouts")
            continue
        if offset < position:
            found[number][offset] += 1
    return found


def _check_records(kafka: KafkaConfig, run: str, journals: dict[int, PartitionJournal], result: Ledger) -> int:
    """Rollouts against the journal: below the position every record has a place, and every place a record.

    Returns how many of the records in flight are rollouts.
    """
    topic = topic_name(run, "rollouts")
    frames = codec.frames("Rollout")
    seen: dict[int, set[int]] = {p: set() for p in journals}
    rollouts: Counter[int] = Counter()
    unread: Counter[int] = Counter()
    in_flight = 0
    for message in clients.read_to_end(kafka, topic):
        number, offset = message.partition() or 0, message.offset() or 0
        journal = journals[number]
        rollout = (message.value() or b"").startswith(frames)
        if offset >= journal.position:
            result.unread += 1
            unread[number] += rollout
        elif not journal.settled_before(offset):
            seen[number].add(offset)
            rollouts[number] += rollout
            fate = journal.fate(offset)
            if fate is None:
                result.problem(f"rollouts[{number}] offset {offset} was read and is nowhere")
            in_flight += rollout and fate == IN_FLIGHT
    lows = {p: low for p, (low, _end) in clients.bounds(kafka, topic).items()}
    for number, journal in journals.items():
        gone = journal.offsets() - seen[number]
        for offset in sorted(gone):
            if offset >= lows[number]:
                result.problem(f"rollouts[{number}] offset {offset} is {journal.fate(offset)} and holds no record")
            elif journal.fate(offset) == IN_FLIGHT:
                result.problem(f"rollouts[{number}] offset {offset} is in flight and was deleted")
        deleted = sum(offset < lows[number] for offset in gone)
        settled = sum(journal.before.values())
        result.pruned += settled + deleted
        result.produced += len(seen[number]) + deleted + settled
        if settled or deleted:
            read = Counter({READ: sum(count.rollouts for count in journal.produced)})
            result.rollouts += read[READ] - journal.before[DEAD_LETTERED] - len(journal.offsets(DEAD_LETTERED))
        else:
            result.rollouts += rollouts[number]
    result.rollouts += sum(unread.values())
    result.produced += result.unread
    return in_flight


def _sum_up(journals: dict[int, PartitionJournal], in_flight: int, result: Ledger) -> None:
    """Totals by fate: what was settled before the journal begins by its counts, what came since by its offsets."""
    fates: Counter[str] = Counter()
    for journal in journals.values():
        fates += journal.before
        fates += journal.since
        result.in_flight += len(journal.offsets(IN_FLIGHT))
    result.batched, result.control, result.dead_lettered = fates[BATCHED], fates[CONTROL], fates[DEAD_LETTERED]
    dropped = {fate.partition(":")[2]: count for fate, count in fates.items() if fate.startswith(f"{DROPPED}:")}
    if dropped.pop("", 0):
        result.problem("records are dropped without a reason")
    result.dropped = dropped
    open_by_environments = 0
    for environment, of in environments(journals.values()).items():
        figures: dict[str, Any] = {}
        for name, counts in of.items():
            ended = {fate: counts[fate] for fate in sorted(counts) if fate not in (READ, CONTROL) and counts[fate]}
            figures[name] = {"produced": counts[READ], **ended, IN_FLIGHT: counts[READ] - sum(ended.values())}
        open_by_environments += figures["records"][IN_FLIGHT]
        if any(figures["records"].values()):
            result.environments[environment] = figures
    if open_by_environments != in_flight:
        result.problem(
            f"by the journal's counts {open_by_environments} rollouts are without a fate; {in_flight} are in flight"
        )


def _are_rows(use: BatchUse, rows: int | None) -> bool:
    """Whether a batch of so many rows has those a use names: all of them, or some by number."""
    if not use.row_numbers:
        return rows == use.rows
    return rows is not None and len(set(use.row_numbers)) == use.rows and max(use.row_numbers) < rows


def _check_steps(
    steps: list[LearnerStep],
    rows: dict[str, int],
    journals: dict[int, PartitionJournal],
    run: str,
    result: Ledger,
) -> None:
    """Uses against batches: each rollout is trained on for the first time, or skipped, at most once a learner, and
    never one that does not exist; only what was trained on is used again.
    """
    used: dict[tuple[str, str, str], set[int]] = {}
    kept = {partition: journal.batches for partition, journal in journals.items()}
    for batch_id in rows:
        partition, number = batch_numbers(batch_id)
        kept[partition] = min(kept[partition], number)
    for step in sorted(steps, key=lambda s: (s.learner, s.step)):
        result.steps += step.step > 0
        for use in step.uses if step.input_run == run else ():
            what = f"step {step.step} of learner {step.learner}"
            named = set(use.row_numbers or range(use.rows))
            trained, skipped = (
                used.setdefault((step.learner, use.batch_id, kind), set()) for kind in ("trained", "skipped")
            )
            if use.again and not named <= trained:
                result.problem(f"{what} uses rollouts of batch {use.batch_id} again that it had not trained on")
            elif not use.again and named & (trained | skipped):
                result.problem(f"{what} uses batch {use.batch_id} a second time")
            (trained if use.use == "trained" else skipped).update(named)
            partition, number = batch_numbers(use.batch_id)
            deleted = result.pruned and number < kept.get(partition, 0)
            if not deleted and not _are_rows(use, rows.get(use.batch_id)):
                result.problem(
                    f"{what} used {use.rows} rows of batch {use.batch_id}, which has {rows.get(use.batch_id, 'none')}"
                )
            if use.again:
                continue
            if use.use == "trained":
                result.trained += use.rows
            else:
                result.skipped += use.rows
