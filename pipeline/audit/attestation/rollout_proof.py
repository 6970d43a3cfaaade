"""Proofs of one rollout's fate, which are checked with a signed statement and a few hashes, without an archive.

A proof leads from the rollout to its batch, to the steps that used its row, and to the first policy version that was
published after the first step that trained on it. Nobody who only has the proof can tell whether it shows all steps.
"""

import json
from dataclasses import asdict, dataclass

import msgspec

from rollstream.pipeline.audit.attestation.evidence import Evidence
from rollstream.pipeline.audit.attestation.statement import Disproved, Statement
from rollstream.pipeline.audit.attestation.trees import Leaf, TreeName, canonical, root_of_path, uses_of_row
from rollstream.topics.errors import ConfigurationError, StateRefused
from rollstream.topics.records.fates import BATCHED

FORMAT = "rollstream proof 1"


@dataclass(frozen=True, kw_only=True)
class Inclusion:
    """One entry of a tree, and the hashes that lead from it to the root."""

    leaf: Leaf
    index: int
    path: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RolloutProof:
    """The fate of one rollout, with the hashes that lead from its entries to the roots of a statement."""

    statement: str
    """Digest of the statement whose trees the paths lead to."""
    rollout: Inclusion
    batch: Inclusion | None
    """The batch that carries the rollout."""
    steps: tuple[Inclusion, ...]
    """The steps that used the rollout's row."""
    version: Inclusion | None
    """The first policy version after the first step that trained on the rollout."""

    def to_json(self) -> str:
        """Encode the proof for a file."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "RolloutProof":
        """Decode the text of a file. Raises StateRefused if it is not a proof."""
        try:
            values = json.loads(text)
            if values.pop("format") != FORMAT:
                raise StateRefused("the proof has another format; check it with the release that made it")
            return msgspec.convert(values, cls)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, msgspec.ValidationError) as error:
            raise StateRefused(f"this is not a proof of rollstream attest: {error!r}") from error


class RolloutEntries:
    """The entries of one uid among the rollouts of an archive; pass an instance to `evidence_of` as `on_rollout`."""

    def __init__(self, uid: str) -> None:
        self.uid = uid
        self.entries: list[tuple[int, Leaf]] = []

    def __call__(self, index: int, leaf: Leaf) -> None:
        """Keep the entry if it has this uid."""
        if leaf["uid"] == self.uid:
            self.entries.append((index, leaf))

    def chosen(self) -> tuple[int, Leaf]:
        """Return the entry that is in a batch, else the first entry. Raises ConfigurationError if there is no entry."""
        if not self.entries:
            raise ConfigurationError(f"no rollout {self.uid!r} is in the part of the archive that the statement covers")
        return next((entry for entry in self.entries if entry[1]["batch"]), self.entries[0])


def proof_of(statement: Statement, evidence: Evidence, entries: RolloutEntries) -> RolloutProof:
    """Return the proof of a rollout, from the evidence that the statement was compared with."""

    def inclusion(name: TreeName, index: int, leaf: Leaf) -> Inclusion:
        path = tuple(node.hex() for node in evidence.trees[name].path(index))
        return Inclusion(leaf=leaf, index=index, path=path)

    index, leaf = entries.chosen()
    batch, steps, version = None, list[Inclusion](), None
    if leaf["batch"]:
        at, batch_leaf = next((n, b) for n, b in enumerate(evidence.batches) if b["batch"] == leaf["batch"])
        batch = inclusion("batches", at, batch_leaf)
        used = ((n, s) for n, s in enumerate(evidence.steps) if any(uses_of_row(s, leaf["batch"], leaf["row"])))
        steps = [inclusion("steps", n, s) for n, s in used]
        first = next((step.leaf for step in steps if _trains(step.leaf, leaf)), None)
        if first is not None:
            after = ((n, v) for n, v in enumerate(evidence.versions) if _holds(v, first))
            version = next((inclusion("versions", n, v) for n, v in after), None)
    return RolloutProof(
        statement=statement.digest,
        rollout=inclusion("rollouts", index, leaf),
        batch=batch,
        steps=tuple(steps),
        version=version,
    )


def fate_in(statement: Statement, proof: RolloutProof) -> Leaf:
    """Return what a proof shows about its rollout.

    Raises Disproved if the proof contradicts the statement, StateRefused if it cannot be checked with it.

    `trained_by` has learner and number of each step in the proof that trained on the rollout. `in_policy` is True if
    the policy version of the statement includes one of these steps, False if the rollout is in no batch, and otherwise
    None, because a proof may leave out steps.
    """
    if proof.statement != statement.digest:
        raise StateRefused("the proof belongs to another statement")
    _include(statement, "rollouts", proof.rollout)
    rollout, policy = proof.rollout.leaf, statement.policy
    if proof.batch is not None:
        _include(statement, "batches", proof.batch)
    named = "" if proof.batch is None else proof.batch.leaf["batch"]
    if named != rollout["batch"]:
        raise Disproved(f"the proof shows batch {named or 'none'}, but the rollout is in {rollout['batch'] or 'none'}")
    for step in proof.steps:
        _include(statement, "steps", step)
        if not any(uses_of_row(step.leaf, rollout["batch"], rollout["row"])):
            raise Disproved(f"step {step.leaf['step']} in the proof does not use the rollout")
    trained = [step.leaf for step in proof.steps if _trains(step.leaf, rollout)]
    if proof.version is not None:
        _include(statement, "versions", proof.version)
        if not any(_holds(proof.version.leaf, step) for step in trained):
            raise Disproved(
                f"version {proof.version.leaf['version']} in the proof includes none of the steps that trained on the "
                f"rollout"
            )
    return {
        "uid": rollout["uid"],
        "place": f"{rollout['partition']}:{rollout['offset']}",
        "value": rollout["value"],
        "fate": BATCHED if rollout["batch"] else rollout["fate"],
        "batch": rollout["batch"],
        "row": rollout["row"],
        "trained_by": [[step["learner"], step["step"]] for step in trained],
        "version": None if proof.version is None else proof.version.leaf["version"],
        "in_policy": any(_holds(policy, step) for step in trained) or (None if rollout["batch"] else False),
    }


def _include(statement: Statement, name: TreeName, inclusion: Inclusion) -> None:
    root = statement.trees[name]
    try:
        path = [bytes.fromhex(node) for node in inclusion.path]
    except ValueError as error:
        raise StateRefused(f"the proof has an invalid hash: {error}") from error
    shown = root_of_path(canonical(inclusion.leaf), inclusion.index, root.entries, path)
    if shown is None or shown.hex() != root.root:
        raise Disproved(f"the proof is invalid: its entry of {name} is not in the statement's tree")


def _trains(step: Leaf, rollout: Leaf) -> bool:
    return any(use["use"] == "trained" for use in uses_of_row(step, rollout["batch"], rollout["row"]))


def _holds(version: Leaf, step: Leaf) -> bool:
    """Whether a policy version was published by the learner of a step, after that step or a later one."""
    return bool(version["learner"] == step["learner"] and version["step"] >= step["step"])
