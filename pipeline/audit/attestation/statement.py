"""Statements: "this policy version was trained on exactly these rollouts", as a small signed JSON file.

A statement is made from evidence without contradictions, and checked against evidence from another copy of the archive.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import version

import msgspec

from rollstream.consumers.grouping.core.effects import CORE_VERSION
from rollstream.pipeline.audit.attestation.archive_cut import ArchiveCut, Ends
from rollstream.pipeline.audit.attestation.evidence import Evidence
from rollstream.pipeline.audit.attestation.trees import TREES, Leaf, canonical, digest_of
from rollstream.topics.errors import ConfigurationError, StateRefused
from rollstream.topics.wire.signatures import Signer, check_public_key, is_signature

FORMAT = "rollstream attestation 1"
_CONTEXT = b"rollstream attestation\0"
_COMPACTED = "compaction may have removed it before it was archived: use an archive that was begun earlier"


class Disproved(StateRefused):
    """A proof or a model was checked, and contradicts the statement."""

    exit_code = 1


@dataclass(frozen=True, kw_only=True)
class Root:
    """The length of a list and the root of its tree, which together determine the entries of the list."""

    entries: int
    root: str


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A claim about a run. All but the last three fields follow from the archive."""

    run: str
    topic_ids: Mapping[str, str]
    ends: Ends
    """By topic and partition, the offset after the last record that the statement covers."""
    policy: Leaf
    """The policy version that was trained: version, learner, step, and the digests of its parameters and its model."""
    trained: Mapping[str, int]
    """Number of the learner's steps up to this version, and of their rollouts by use; the use `trained` excludes
    `trained_again`."""
    records: Mapping[str, int]
    """Number of records of `rollouts` by fate. The sum is the number of entries of the tree."""
    trees: Mapping[str, Root]
    configurations: Mapping[int, str]
    """Digest of each grouping configuration in the journal, by generation."""
    software: Mapping[str, str]
    made: str
    """Time, ISO 8601."""
    key: str
    """Public key of the signer."""

    def content(self) -> bytes:
        """Encode the bytes that are signed."""
        # Convert to JSON first, so that the keys of all objects are texts when they are sorted.
        return canonical(json.loads(json.dumps({"format": FORMAT, **asdict(self)})))

    @property
    def digest(self) -> str:
        """Digest of the signed content, by which proofs refer to the statement."""
        return digest_of(self.content())


def statement_of(cut: ArchiveCut, evidence: Evidence, key: str, policy_version: int | None = None) -> Statement:
    """Return the statement about a policy version, by default the newest, that the evidence supports.

    Raises StateRefused if the evidence has contradictions, ConfigurationError if the version is not on record.
    """
    problems = evidence.problems
    if problems:
        more = f" (and {len(problems) - 1} more contradictions)" if problems[1:] else ""
        raise StateRefused(
            f"run {cut.run} is not attested: {problems[0]}{more}; `rollstream ledger` and `rollstream verify` check "
            "its topics"
        )
    versions = {leaf["version"]: leaf for leaf in evidence.versions}
    chosen = max(versions, default=None) if policy_version is None else policy_version
    if chosen not in versions:
        held = f"{min(versions)} to {max(versions)}" if versions else "none"
        raise ConfigurationError(f"run {cut.run} has no policy version {chosen} in the archive; it has {held}")
    policy = versions[chosen]
    if problem := _unsupported(policy, evidence):
        raise StateRefused(f"run {cut.run} is not attested: {problem}; choose another version with --policy")
    return _about(policy, cut, evidence, key)


def _about(policy: Leaf, cut: ArchiveCut, evidence: Evidence, key: str) -> Statement:
    """Return what the evidence supports about a policy version."""
    steps = [s for s in evidence.steps if s["learner"] == policy["learner"] and s["step"] <= policy["step"]]
    uses = [use for step in steps for use in step["uses"]]
    return Statement(
        run=cut.run,
        topic_ids=cut.topic_ids,
        ends=evidence.ends,
        policy=policy,
        trained={
            "steps": sum(step["step"] > 0 for step in steps),
            "trained": _rows(uses, "trained", again=False),
            "trained_again": _rows(uses, "trained", again=True),
            "skipped": _rows(uses, "skipped", again=False),
        },
        records=dict(sorted(evidence.counts.items())),
        trees={name: Root(entries=len(tree), root=tree.root().hex()) for name, tree in evidence.trees.items()},
        configurations=dict(sorted(evidence.configurations.items())),
        software={"rollstream": version("rollstream"), "core_version": str(CORE_VERSION)},
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        key=key,
    )


def _unsupported(policy: Leaf, evidence: Evidence) -> str:
    """Say why the steps on record do not lead to a policy version; empty if they do."""
    after = f"after step {policy['step']} of learner {policy['learner']}"
    step = next((s for s in evidence.steps if (s["learner"], s["step"]) == (policy["learner"], policy["step"])), None)
    if step is None:
        return f"policy version {policy['version']} was published {after}, which is not in the archive; {_COMPACTED}"
    if step["params_digest"] != policy["params_digest"]:
        return f"policy version {policy['version']} has other parameters than there were {after}"
    return ""


def _rows(uses: list[Leaf], use: str, *, again: bool) -> int:
    return sum(item["rows"] for item in uses if item["use"] == use and item["again"] == again)


def signed(statement: Statement, signer: Signer) -> str:
    """Return the text of a statement with its signature, as it is stored in a file."""
    signature = signer.signature(statement.content(), _CONTEXT).hex()
    return json.dumps({"format": FORMAT, **asdict(statement), "signature": signature}, indent=1) + "\n"


def opened(text: str, key: str) -> Statement:
    """Return the statement in a text. Raises StateRefused if it is not a statement, or not signed with `key`."""
    check_public_key(key, "--key")
    try:
        values = json.loads(text)
        if values.pop("format") != FORMAT:
            raise StateRefused("the statement has another format; check it with the release that made it")
        signature = bytes.fromhex(values.pop("signature"))
        statement = msgspec.convert(values, Statement, str_keys=True)
        extra = values.keys() - {f.name for f in fields(Statement)}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, msgspec.ValidationError) as error:
        raise StateRefused(f"this is not a statement of rollstream attest: {error!r}") from error
    if statement.key != key:
        raise StateRefused(f"the statement is signed with key {statement.key[:64]}, not with {key}")
    if extra or not is_signature(signature, statement.content(), _CONTEXT, key):
        raise StateRefused(f"the statement does not match the signature of key {key}: it was changed after signing")
    return statement


def differences(statement: Statement, cut: ArchiveCut, evidence: Evidence) -> list[str]:
    """Return the differences between a signed statement and an archive whose evidence has no contradictions.

    Key, time and software are not compared.
    """
    differing = []
    number = statement.policy["version"]
    policy = next((leaf for leaf in evidence.versions if leaf["version"] == number), None)
    if policy is None:
        differing.append(f"policy version {number} is not in the archive; {_COMPACTED}")
    elif problem := _unsupported(policy, evidence):
        differing.append(problem)
    other = _about(policy or statement.policy, cut, evidence, statement.key)
    for name in TREES:
        there, due = other.trees[name], statement.trees.get(name)
        if there != due:
            attested = "none" if due is None else f"{due.entries:,} with root {due.root[:16]}"
            held = f"{there.entries:,} entries with root {there.root[:16]}"
            differing.append(f"{name}: the archive has {held}, the statement {attested}")
    for field in ("run", "topic_ids", "ends", "policy", "trained", "records", "configurations"):
        if canonical(getattr(statement, field)) != canonical(getattr(other, field)):
            differing.append(f"{field}: the archive and the statement differ")
    return differing
