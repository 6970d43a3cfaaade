"""`rollstream attest`: signs what a model was trained on, and checks such statements from an archive alone.

Exit code 0 if a check passes, 1 if an archive does not confirm a statement, or a proof or a model contradicts it, and 2
for any other error. No broker is needed.
"""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rollstream.consumers.files import safetensors_files
from rollstream.consumers.grouping.core.plug_ins import load_plug_ins
from rollstream.consumers.models import huggingface
from rollstream.consumers.models.config import decoder_config
from rollstream.consumers.models.parameters import is_adapter
from rollstream.pipeline.audit.attestation.archive_cut import ArchiveCut
from rollstream.pipeline.audit.attestation.evidence import Evidence, RolloutCallback, evidence_of
from rollstream.pipeline.audit.attestation.rollout_proof import RolloutEntries, RolloutProof, fate_in, proof_of
from rollstream.pipeline.audit.attestation.statement import (
    Disproved,
    Statement,
    differences,
    opened,
    signed,
    statement_of,
)
from rollstream.pipeline.audit.attestation.trees import digest_of
from rollstream.pipeline.command_line.command_parser import add_command, set_handler
from rollstream.pipeline.command_line.plain_values import compact, tell
from rollstream.pipeline.command_line.text_tables import table
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.tools.archive import place_of
from rollstream.topics.errors import ConfigurationError, StateRefused
from rollstream.topics.files.stores import open_store
from rollstream.topics.records import PolicyManifest
from rollstream.topics.wire.params_digest import params_digest
from rollstream.topics.wire.signatures import Signer

_SHOWN = 16
"""Number of characters shown of a digest."""


def register(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `rollstream attest`."""
    actions = parser.add_subparsers(dest="action", metavar="COMMAND", required=True)
    sign = add_command(actions, "sign", "check an archive, and sign what a policy version was trained on")
    example = "rollstream attest sign --run main --signing-key attest.pem -o main.json"
    set_handler(sign, sign_statement, example=example, json=True)
    sign.add_argument("--signing-key", required=True, metavar="FILE", help="private key, from `rollstream key new`")
    sign.add_argument("--policy", type=int, metavar="N", help="the policy version (default: the newest)")
    sign.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="where to write the statement")
    check = add_command(actions, "check", "check a statement from an archive, or a proof from a statement")
    set_handler(check, check_statement, example="rollstream attest check main.json --key 8ea6bc7c...", json=True)
    check.add_argument("--proof", type=Path, metavar="FILE", help="check this proof instead; needs no archive")
    check.add_argument(
        "--model",
        type=Path,
        metavar="PATH",
        help="a safetensors file, or a folder with a checkpoint: also compare the model; adapters must not be merged",
    )
    prove = add_command(actions, "prove", "prove from an archive what became of one rollout")
    example = (
        "rollstream attest prove main.json env-1.640e3ee0.6391.96ab20993f79daf4.0 --key 8ea6bc7c... -o rollout.json"
    )
    set_handler(prove, prove_rollout, example=example, json=True)
    for form in (check, prove):
        form.add_argument("statement", type=Path, metavar="STATEMENT", help="the file with the signed statement")
        form.add_argument("--key", required=True, metavar="KEY", help="public key of the signer")
    prove.add_argument("uid", metavar="UID", help="the rollout")
    prove.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="where to write the proof")
    for form in (sign, check, prove):
        form.add_argument("--archive", metavar="ARCHIVE", help="directory or URL (default: archive in data_dir)")


def sign_statement(config: RunConfig, args: argparse.Namespace) -> int:
    """Write a signed statement, unless the archive contradicts itself."""
    signer = Signer(f"file:{args.signing_key}", "signing_key")
    cut = ArchiveCut(open_store(place_of(config, args.archive)), config.run)
    evidence = evidence_of(cut, load_plug_ins(config.grouper))
    statement = statement_of(cut, evidence, signer.public, args.policy)
    _write(args.output, signed(statement, signer))
    if args.json:
        print(compact({"statement": str(args.output), **asdict(statement)}))
    else:
        print(f"{text_of(statement, evidence)}\n\nsigned with key {statement.key}: {args.output}")
    tell(cut.skipped)
    return 0


def check_statement(config: RunConfig, args: argparse.Namespace) -> int:
    """Print whether an archive confirms a statement, and return 1 if not; or print what a proof shows.

    Raises Disproved for a proof that contradicts the statement, or a model that is not the statement's.
    """
    statement = opened(_read(args.statement), args.key)
    if args.model is not None:
        cut = None if args.proof else ArchiveCut(open_store(_place(config, args)), statement.run, statement.ends)
        check_model(args.model, statement, adapted=cut is not None and _has_adapters(cut, statement))
    if args.proof is not None:
        answer = fate_in(statement, RolloutProof.from_json(_read(args.proof)))
        print(compact(answer) if args.json else proof_text(statement, answer))
        return 0
    cut, evidence = _judged(config, args, statement)
    problems = [*evidence.problems]
    if not problems:
        problems = differences(statement, cut, evidence)
    if args.json:
        print(compact({"holds": not problems, "problems": problems, "folded": evidence.folded, **asdict(statement)}))
    elif problems:
        print("\n".join((f"THE STATEMENT DOES NOT HOLD for {_place(config, args)}:", *problems)))
    else:
        print(f"{text_of(statement, evidence)}\n\nthe statement holds for {_place(config, args)}")
    tell(cut.skipped)
    return 1 if problems else 0


def prove_rollout(config: RunConfig, args: argparse.Namespace) -> int:
    """Write a proof of what became of a rollout. Raises StateRefused if the statement does not hold."""
    statement, entries = opened(_read(args.statement), args.key), RolloutEntries(args.uid)
    cut, evidence = _judged(config, args, statement, entries)
    problems = evidence.problems or differences(statement, cut, evidence)
    if problems:
        raise StateRefused(f"nothing can be proved: the statement does not hold: {problems[0]}")
    proof = proof_of(statement, evidence, entries)
    answer = fate_in(statement, proof)
    _write(args.output, proof.to_json())
    print(compact({"proof": str(args.output), **answer}) if args.json else proof_text(statement, answer))
    return 0


def check_model(path: Path, statement: Statement, *, adapted: bool = False) -> None:
    """Raise Disproved unless safetensors hold the parameters of the statement's policy version.

    `adapted` means that the version has adapters. If the files have none, nothing can be told of them: the digest
    covers the adapters and the parameters without them. Raises ConfigurationError for such files.
    """
    arrays, policy = _tensors(path), statement.policy
    digest = params_digest(arrays)
    if digest == policy["digest"]:
        return
    pull = f"`rollstream weights export {policy['version']} -o DIR --run {statement.run} --format published` writes it"
    if adapted and not any(map(is_adapter, arrays)):
        raise ConfigurationError(
            f"{path} cannot be compared with policy version {policy['version']}, which has adapters: its files have "
            f"none, as after merging; {pull} with adapters apart"
        )
    raise Disproved(
        f"{path} does not hold policy version {policy['version']}: its {len(arrays)} tensors have digest {digest}, "
        f"the version has {policy['digest']}; {pull} as it was published"
    )


def _tensors(path: Path) -> dict[str, Any]:
    """Return the tensors of a file, or of the checkpoint in a folder.

    Raises ConfigurationError if programs that load the folder may differ in the tensors that they load.
    """
    if not path.is_dir():
        return safetensors_files.read(path)
    places: dict[str, Path] = {}
    arrays: dict[str, Any] = {}
    for file in sorted(path.glob("*.safetensors")):
        stored = safetensors_files.read(file)
        for name in stored.keys() & places.keys():
            raise ConfigurationError(
                f"{path} has tensor {name} in {places[name].name} and in {file.name}, so programs may load different "
                "models from it; remove the file that does not belong to the model"
            )
        places |= dict.fromkeys(stored, file)
        arrays |= stored
    if not arrays:
        raise ConfigurationError(f"{path} has no safetensors file with tensors; give the file or the folder of a model")
    marks = [name for name in (huggingface.SINGLE, huggingface.INDEX) if (path / name).exists()]
    if len(marks) > 1:
        raise ConfigurationError(f"{path} has {' and '.join(marks)}; remove the one that does not belong to the model")
    loaded = huggingface.checkpoint_files(path) if marks else [*places.values()]
    return {name: array for name, array in arrays.items() if places[name] in loaded}


def _has_adapters(cut: ArchiveCut, statement: Statement) -> bool:
    """Whether the model of the statement has adapters, according to a manifest of that model in the archive."""
    for _message, manifest in cut.records("policies", PolicyManifest):
        if digest_of(manifest.model.encode()) == statement.policy["model"]:
            try:
                return decoder_config(manifest.model).lora.rank > 0
            except ConfigurationError:
                return False  # It is not one of rollstream's models, which alone are merged.
    return False


def _judged(
    config: RunConfig,
    args: argparse.Namespace,
    statement: Statement,
    on_rollout: RolloutCallback = lambda _index, _leaf: None,
) -> tuple[ArchiveCut, Evidence]:
    cut = ArchiveCut(open_store(_place(config, args)), statement.run, statement.ends)
    return cut, evidence_of(cut, load_plug_ins(config.grouper), on_rollout)


def _place(config: RunConfig, args: argparse.Namespace) -> str:
    return place_of(config, args.archive)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"nothing was written: {error}") from error


def text_of(statement: Statement, evidence: Evidence) -> str:
    """Return the statement as text for people."""
    policy, trained = statement.policy, statement.trained
    records = [(fate, count) for fate, count in statement.records.items()]
    roots = [(name, tree.entries, tree.root[:_SHOWN]) for name, tree in statement.trees.items()]
    again = f", {trained['trained_again']:,} of them again" if trained["trained_again"] else ""
    return "\n\n".join(
        (
            f"run {statement.run}, policy version {policy['version']}, parameters {policy['digest'][:_SHOWN]}\n"
            f"trained by learner {policy['learner']} in {trained['steps']:,} steps on exactly {trained['trained']:,} "
            f"rollouts{again}; {trained['skipped']:,} were skipped, as the steps record",
            table(("records of rollouts", "number"), records),
            table(("tree", "entries", "root"), roots),
            f"every record is in exactly one place; {evidence.folded:,} batches computed again, 0 differences",
        )
    )


def proof_text(statement: Statement, answer: dict[str, object]) -> str:
    """Return the content of a proof as text for people."""
    lines = [f"rollout {answer['uid']}: record {answer['place']} of rollouts, {answer['fate']}"]
    if answer["batch"]:
        lines.append(f"batch {answer['batch']}: row {answer['row']}")
    steps = answer["trained_by"]
    assert isinstance(steps, list)
    lines += [f"trained on by step {step} of learner {learner}" for learner, step in steps]
    if answer["version"] is not None:
        lines.append(f"in policy version {answer['version']}")
    version = statement.policy["version"]
    if answer["in_policy"] is None:
        lines.append(f"the proof shows no step of policy version {version} that trained on it")
    else:
        among = "is" if answer["in_policy"] else "is not"
        lines.append(f"it {among} among the rollouts that policy version {version} was trained on")
    return "\n".join(lines)
