"""`rollstream lineage`: shows the origin and the fate of a rollout, batch, step or policy version as a tree.

A rollout names the version that sampled it, a batch the offsets it was cut from, a step its batches, and a policy
version its step; the tree follows these references in both directions.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rollstream.pipeline.command_line.plain_values import decoded, time_text
from rollstream.pipeline.command_line.text_tables import printable
from rollstream.pipeline.index.fates import SETTLED
from rollstream.pipeline.index.indexed_run import Fate, IndexedRun, RolloutPlace, StepUse
from rollstream.topics.errors import ConfigurationError, TopicError
from rollstream.topics.records import GroupCancelled, LearnerStep, Mark, PolicyManifest, Rollout, TrainingBatch
from rollstream.topics.records.fates import BATCHED, DROPPED
from rollstream.topics.records.journal import spans_of, to_ranges

_LOST = "a batch that the log does not hold where the index says"


@dataclass
class LineageNode:
    """A rollout, batch, step or policy version with its facts and the nodes below it."""

    kind: str
    name: str
    facts: dict[str, Any] = field(default_factory=dict)
    children: list["LineageNode"] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Convert the tree to plain values for JSON."""
        children = {"children": [child.as_dict() for child in self.children]} if self.children else {}
        return {"kind": self.kind, "name": self.name, **self.facts, **children}

    def lines(self, first: str = "", rest: str = "") -> Iterable[str]:
        """Yield the tree as lines of text, one for each node; what a terminal would obey is escaped."""
        facts = ", ".join(f"{name.replace('_', ' ')} {_text(value)}" for name, value in self.facts.items())
        yield first + printable(f"{self.kind.replace('_', ' ')} {self.name}{': ' if facts else ''}{facts}", keep="")
        for i, child in enumerate(self.children):
            last = i == len(self.children) - 1
            yield from child.lines(rest + ("└─ " if last else "├─ "), rest + ("   " if last else "│  "))


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(
            f"{key} ({count:,})" if isinstance(count, int) else f"{key} {count}" for key, count in value.items()
        )
    if isinstance(value, list):
        return " ".join(map(str, value))
    return f"{value:.6g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def parse_place(text: str) -> RolloutPlace:
    """Parse PARTITION:OFFSET. Raises ConfigurationError for anything else."""
    partition, _, offset = text.partition(":")
    if not (partition.isdecimal() and offset.isdecimal()):
        raise ConfigurationError(f"{text!r} is not a place in rollouts; give PARTITION:OFFSET, such as 0:1234")
    return RolloutPlace(int(partition), int(offset))


def rollout_places(view: IndexedRun, uid: str) -> list[RolloutPlace]:
    """Return the places of the rollouts with a uid. Raises TopicError if there is none."""
    places = view.places_of(uid)
    if not places:
        raise TopicError(f"no rollout of run {view.run} has uid {uid!r}; `rollstream cat rollouts` lists them")
    return places


# ---------------------------------------------------------------------- from a record of rollouts


def record_lineage(view: IndexedRun, place: RolloutPlace) -> LineageNode:
    """Return the lineage of a record of `rollouts`: the version that sampled it, its group, its fate and its batch."""
    message = view.record("rollouts", *place)
    record = decoded(message.value)
    node = LineageNode(*_name_of(record), {"offset": str(place), "appended": time_text(message.timestamp_ms)})
    fate = view.fate(place)
    if isinstance(record, Rollout):
        node.facts |= {
            "environment": record.environment,
            "example": record.example_id,
            "reward": record.reward,
            "tokens": len(record.tokens),
        }
        node.children.append(_sampler(view, record))
    batch = view.batch_of(place, fate)
    node.children.append(fate_node(view, place, fate, batch))
    generation = fate.generation if batch is None else batch.generation
    if generation >= 0:
        node.children.append(_configuration(view, place.partition, generation))
    return node


def _configuration(view: IndexedRun, partition: int, generation: int) -> LineageNode:
    """Return the node of the grouping configuration under which a record's fate was decided, or a batch was cut."""
    return LineageNode(
        "configuration", f"of generation {generation}", {**view.configuration(partition, generation).facts}
    )


def _name_of(record: Any) -> tuple[str, str]:
    if isinstance(record, Rollout):
        return "rollout", record.uid
    if isinstance(record, GroupCancelled):
        return "cancellation", f"of {', '.join(record.uids)}"
    if isinstance(record, Mark):
        return "mark", record.kind
    return "record", "of an unknown type"


def _sampler(view: IndexedRun, rollout: Rollout) -> LineageNode:
    versions = {rollout.lowest_version, rollout.highest_version}
    facts: dict[str, Any] = {"worker": rollout.metadata.worker_id} if rollout.metadata.worker_id else {}
    if len(versions) > 1:
        facts["tokens_by_versions"] = sorted(versions)
    node = LineageNode("sampled_by_policy", str(rollout.policy_version), facts)
    manifest = view.policy(rollout.policy_version)
    if manifest is not None:
        node.facts |= _made_by(manifest)
    return node


def fate_node(view: IndexedRun, place: RolloutPlace, fate: Fate, batch: TrainingBatch | None) -> LineageNode:
    """Return the node of a record's fate; `batch` is the batch that carries the record, if any."""
    if fate.name == DROPPED and fate.drop is not None:
        return LineageNode(
            "fate", f"dropped: {fate.drop.reason}", {"detail": fate.drop.detail} if fate.drop.detail else {}
        )
    if fate.name == SETTLED:
        return LineageNode("fate", SETTLED, {"in": "a part of the journal that was pruned"})
    if fate.name != BATCHED:
        return LineageNode("fate", fate.name.replace("_", " "))
    if batch is None:
        return LineageNode("fate", "batched", {"in": "a batch that is not in the index (any more)"})
    row = batch.source_offsets.tolist().index(place.offset)
    group = batch.groups[int(batch.group_index[row])]
    members = [i for i, g in enumerate(batch.group_index.tolist()) if g == int(batch.group_index[row])]
    node = _batch(view, batch, row)
    node.facts = {"row": row, "advantage": float(batch.advantages[batch.splits[row]]), **node.facts}
    node.children.insert(
        0,
        LineageNode(
            "group",
            f"{group.environment}/{group.example_id}@{group.policy_version}",
            {
                "members": group.size,
                "rewards": [f"{batch.rewards[i]:g}" for i in members],
                "with": [batch.uids[i] for i in members if i != row],
            },
        ),
    )
    return node


# ---------------------------------------------------------------------- batches, steps, policies


def batch_lineage(view: IndexedRun, batch: TrainingBatch) -> LineageNode:
    """Return the lineage of a batch: offsets, sampling versions, and steps that used or skipped it."""
    node = _batch(view, batch)
    node.facts |= {
        "cut": f"by {batch.cut} at {time_text(batch.cut_ms)}",
        "generation": batch.generation,
        "digest": batch.digest,
    }
    node.children.insert(0, _sources(batch))
    node.children.append(_configuration(view, batch.partition, batch.generation))
    return node


def step_lineage(view: IndexedRun, step: LearnerStep) -> LineageNode:
    """Return the lineage of a learner's step: the batches it used or skipped, and the version published after it."""
    node = _step(view, step)
    for use in step.uses:
        code = {"code": use.code} if use.code else {}
        child = LineageNode("batch", use.batch_id, {"rows": use.rows, use.use: use.reason or "yes", **code})
        if step.input_run == view.run and view.entry(use.batch_id) is not None:
            batch = view.batch_on_log(use.batch_id)
            child.children.append(LineageNode("cut_from", _LOST) if batch is None else _sources(batch))
        node.children.insert(-1 if node.children else 0, child)
    return node


def policy_lineage(view: IndexedRun, manifest: PolicyManifest) -> LineageNode:
    """Return the lineage of a policy version: the step that made it, and the batches with rollouts that it sampled."""
    node = LineageNode("policy", str(manifest.version), _made_by(manifest))
    node.children += [step_lineage(view, step) for step in view.steps_before(manifest)]
    rollouts: Counter[str] = Counter()
    lost = []
    for entry in view.entries_with(manifest.version):
        batch = view.batch_on_log(entry.batch_id)
        if batch is None:
            lost.append(entry.batch_id)
            continue
        for group, count in Counter(batch.group_index.tolist()).items():
            if batch.groups[group].policy_version == manifest.version:
                rollouts[entry.batch_id] += count
    if rollouts:
        node.children.append(
            LineageNode("batched_rollouts", f"{sum(rollouts.values()):,}", {"sampled_by_it_in_batches": dict(rollouts)})
        )
    if lost:
        node.children.append(LineageNode("not_counted", _LOST, {"batches": lost}))
    return node


def _made_by(manifest: PolicyManifest) -> dict[str, Any]:
    return {"published_after_step": f"{manifest.learner}/{manifest.step}"}


def _batch(view: IndexedRun, batch: TrainingBatch, row: int | None = None) -> LineageNode:
    """Return the node of a batch with the steps that used or skipped any of its rows, or only the given row."""
    facts: dict[str, Any] = {"rollouts": len(batch)}
    indexed = view.entry(batch.batch_id)
    if indexed is not None:
        facts |= {"at": f"batches {indexed.entry.partition}:{indexed.entry.offset}", "index_offset": indexed.offset}
    uses = [
        _use(view, use)
        for use in view.uses_of(batch.batch_id)
        if row is None or not use.use.row_numbers or row in use.use.row_numbers
    ]
    return LineageNode("batch", batch.batch_id, facts, uses or [LineageNode("step", "none yet")])


def _use(view: IndexedRun, use: StepUse) -> LineageNode:
    node = _step(view, use.step)
    rows = {"rows": use.use.rows} if use.use.row_numbers else {}
    again = {"again": "yes"} if use.use.again else {}
    code = {"code": use.use.code} if use.use.code else {}
    node.facts = {use.use.use: use.use.reason or "yes", **code, **again, **rows, **node.facts}
    return node


def _step(view: IndexedRun, step: LearnerStep) -> LineageNode:
    facts: dict[str, Any] = {"parameters": step.params_digest[:12]} if step.params_digest else {}
    node = LineageNode("step", f"{step.learner}/{step.step}", facts)
    manifest = view.policy(step.policy_version)
    if manifest is not None:
        node.children.append(
            LineageNode("published_as_policy", str(manifest.version), {"digest": manifest.digest[:12]})
        )
    return node


def _sources(batch: TrainingBatch) -> LineageNode:
    runs = spans_of(to_ranges(batch.source_offsets.tolist()))
    spans = [f"{first}" if first == last else f"{first}-{last}" for first, last in runs]
    environments = Counter(batch.groups[g].environment for g in batch.group_index.tolist())
    versions = Counter(f"version {batch.groups[g].policy_version}" for g in batch.group_index.tolist())
    return LineageNode(
        "cut_from",
        f"rollouts[{batch.partition}]",
        {"offsets": spans, "environments": dict(environments), "sampled_by": dict(versions)},
    )
