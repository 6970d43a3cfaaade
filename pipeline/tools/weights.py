"""`rollstream weights`: lists, shows, exports, verifies and compares policy versions, and publishes an old one again.

It reads the log as every follower does: a version is whole and matches its digests, or is refused with the reason.
"""

import argparse
import time
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollstream.consumers.reused_memory import ReusedMemory
from rollstream.consumers.weights.chains import ChainBroken, load_version, needed
from rollstream.consumers.weights.content import Arrays, ChunksGone, ChunksLate, WeightsRefused, place_of
from rollstream.consumers.weights.fetcher import ChunkFetcher
from rollstream.consumers.weights.manifests import none_whole, read_policies
from rollstream.consumers.weights.rollback import RollbackNote, roll_back
from rollstream.pipeline.command_line.command_parser import add_command, set_handler
from rollstream.pipeline.command_line.plain_values import compact, plain, tell, time_text
from rollstream.pipeline.command_line.text_tables import bytes_text, clipped, printable, table
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.tools import export
from rollstream.pipeline.tools.published_versions import (
    GONE,
    UNLISTED,
    PublishedVersions,
    check_published,
    fetching,
    manifests,
    read_whole,
)
from rollstream.topics.files.stores import shown
from rollstream.topics.kafka import clients
from rollstream.topics.records import PolicyManifest

_DAY_S = 86400
_NOTE_WIDTH = 40
_NUMBERS = "biufcV"
"""Kinds of dtypes whose values have a difference; V is that of bfloat16 and float8."""
_EXPIRED = "no longer kept"
_UNREADABLE = "unread: its manifest is damaged, or a newer release wrote it"


def register(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `rollstream weights`."""
    actions = parser.add_subparsers(dest="action", metavar="COMMAND", required=True)
    listing = add_command(actions, "ls", "list policy versions, and whether their chunks are still there")
    set_handler(listing, list_versions, example="rollstream weights ls --run main", json=True)
    show = add_command(actions, "show", "show the manifest of a version")
    set_handler(show, show_version, example="rollstream weights show 17 --run main", json=True)
    export.register(add_command(actions, "export", "fetch a version, check it, and write it to files"))
    verify = add_command(actions, "verify", "check every version that is still kept against its digests")
    set_handler(verify, verify_versions, example="rollstream weights verify --run main", json=True)
    diff = add_command(actions, "diff", "compare two versions: share of changed values and largest difference")
    set_handler(diff, compare_versions, example="rollstream weights diff 16 17 --run main", json=True)
    rollback = add_command(actions, "rollback", "publish a version's parameters again, under the next number")
    set_handler(
        rollback,
        roll_back_to,
        example="rollstream weights rollback 17 --run main --reason 'reward hacking' --take-over",
        json=True,
    )
    rollback.add_argument("--reason", required=True, metavar="TEXT", help="the reason, which is kept on record")
    rollback.add_argument("--by", default="", metavar="NAME", help="the author (default: user and host)")
    rollback.add_argument(
        "--take-over",
        action="store_true",
        help="fence the learner that publishes into the run; without this flag, that learner must be retired",
    )
    for action in (show, rollback):
        action.add_argument("version", type=int, metavar="V", help="number of the version")
    verify.add_argument("version", type=int, nargs="*", metavar="V", help="versions to check (default: all)")
    for name in ("before", "after"):
        diff.add_argument(name, type=int, metavar="V", help=f"the version {name}")


def list_versions(config: RunConfig, args: argparse.Namespace) -> int:
    """List every version."""
    published = _published(config)
    states = published.chunk_states()
    now_s = time.time()
    rows, entries = [], []
    for number, version in sorted(published.by_number.items()):
        manifest, dtypes = version.manifest, version.dtypes or "-"
        age_s = max(0.0, now_s - manifest.created)
        note = "" if version.rollback is None else _note_text(version.rollback)
        step = f"{manifest.learner}/{manifest.step}"
        chunks = f"{version.chunks} {states[number]}" if version.chunks else "-"
        kind = f"delta of {manifest.base}" if manifest.kind == "delta" else manifest.kind
        row = (number, step, kind, bytes_text(version.size_bytes), dtypes, _age_text(age_s), chunks)
        rows.append((*row, clipped(note, _NOTE_WIDTH)))
        entries.append(
            {
                "version": number,
                "learner": manifest.learner,
                "step": manifest.step,
                "kind": manifest.kind,
                "base": manifest.base,
                "size_bytes": version.size_bytes,
                "dtypes": dtypes,
                "age_s": round(age_s, 1),
                "chunks": version.chunks,
                "chunks_state": states[number],
                "digest": manifest.digest,
                "rollback": None if version.rollback is None else version.rollback._asdict(),
            }
        )
    if args.json:
        print(compact(entries))
    elif rows:
        print(table(("version", "step", "kind", "size", "dtype", "age", "chunks", ""), rows))
    else:
        print(f"run {config.run} has no policy version yet")
    return 0


def show_version(config: RunConfig, args: argparse.Namespace) -> int:
    """Print one manifest."""
    published = _published(config, whole=[args.version]).by_number
    check_published(config, published, args.version)
    version = published[args.version]
    manifest = version.manifest
    if args.json:
        note = None if version.rollback is None else version.rollback._asdict()
        print(compact({**plain(manifest, full=True), "rollback": note}))
        return 0
    print(printable(f"policy version {manifest.version} of run {config.run}: {manifest.kind}, of {manifest.learner}"))
    print(printable(f"step: {manifest.step}, published {time_text(int(manifest.created * 1000))}"))
    print(f"digest: {manifest.digest}")
    print(printable(f"model: {manifest.model}"))
    if version.rollback is not None:
        print(printable(_note_text(version.rollback)))
    by_place = Counter(
        f"at {place_of(chunk.url)[0]}" if chunk.url else f"in partition {chunk.partition}" for chunk in manifest.chunks
    )
    where = printable(shown(", ".join(f"{count} {place}" for place, count in sorted(by_place.items()))))
    print(f"chunks: {version.chunks} of {bytes_text(version.size_bytes)} together{f', {where}' if where else ''}\n")
    rows = [
        (
            tensor.name,
            tensor.dtype,
            "x".join(map(str, tensor.shape)) or "scalar",
            "all" if tensor.changed < 0 else f"{tensor.changed:,}",
            tensor.size_bytes,
            tensor.digest[:12],
        )
        for tensor in manifest.tensors
    ]
    print(table(("tensor", "dtype", "shape", "changed", "bytes", "digest"), rows))
    return 0


def verify_versions(config: RunConfig, args: argparse.Namespace) -> int:
    """Check versions; return 1 if one is damaged, cannot be read in time, or is missing although it must be kept."""
    published = _published(config)
    chosen = sorted(args.version or published.by_number)
    check_published(config, published.by_number, *chosen)
    states = published.chunk_states()
    retained = _kept(config, published)
    answers = {number: "not on the log" for number in chosen if published.by_number[number].manifest.kind == "external"}
    answers |= {number: _EXPIRED for number in chosen if states[number] == GONE and number not in retained}
    # The manifests of versions whose chunks are gone are not held whole, because these are most of a long run.
    unchecked = [number for number in chosen if number not in answers]
    found = manifests(config, *unchecked).by_version
    with ChunkFetcher(config.kafka, config.run, files_at_once=config.learner.weights.files_at_once) as fetcher:
        verifier = _Verifier(fetcher, found, config.learner.weights.fetch_timeout_s)
        silent: dict[frozenset[str], int] = {}
        for number in unchecked:
            # If a store does not answer, each version in it that must be whole is waited for, but only one other.
            stores = published.by_number[number].stores
            if states[number] == UNLISTED and number not in retained and stores in silent:
                answers[number] = f"unread: not tried, because its store did not answer for version {silent[stores]}"
                continue
            answers[number] = verifier.check(number)
            if answers[number].startswith("unread"):
                silent[stores] = number
    missing = {number for number in unchecked if answers[number].startswith("missing")}
    if missing & retained:
        # A learner that publishes meanwhile removes versions that were among the newest when this command began.
        retained = _kept(config, PublishedVersions(config))
        answers |= dict.fromkeys(missing - retained, _EXPIRED)
    failed = any(answers[number] != "whole" and (number in retained or number not in missing) for number in unchecked)
    answers = {number: answers[number] for number in chosen}
    if not args.version:
        # A publisher counts such versions, so they are among the newest that must be whole.
        unreadable = read_policies(config.kafka, config.run, none_whole, logged=False).unreadable
        newest = sorted({*published.by_number, *unreadable})[-config.learner.weights.keep_versions :]
        answers |= dict.fromkeys(sorted(unreadable), _UNREADABLE)
        failed = failed or not unreadable.isdisjoint(newest)
    if args.json:
        print(compact([{"version": number, "result": result} for number, result in answers.items()]))
    else:
        print(table(("version", "result"), list(answers.items())))
        sound = sum(result == "whole" for result in answers.values())
        print(f"{sound} of {len(answers)} versions are on the log and match their digests")
    return 1 if failed else 0


def _kept(config: RunConfig, published: PublishedVersions) -> set[int]:
    """Return the versions that must be whole: the newest ones, and all that they build on."""
    of_versions = {number: version.manifest for number, version in published.by_number.items()}
    return needed(of_versions, config.learner.weights.keep_versions)


def compare_versions(config: RunConfig, args: argparse.Namespace) -> int:
    """Compare the tensors of two versions."""
    before, after = _fetch(config, args.before, args.after)
    names = [name for name in before if name in after and _comparable(before[name], after[name])]
    rows = [(name, *_difference(before[name], after[name])) for name in names]
    values = sum(row[2] for row in rows)
    changed = sum(row[3] for row in rows)
    largest = max((row[4] for row in rows if row[4] is not None), default=0.0)
    others = sorted((before.keys() | after.keys()) - set(names))
    if args.json:
        keys = ("tensor", "dtype", "values", "changed", "max_abs_difference")
        tensors = [dict(zip(keys, row, strict=True)) for row in rows]
        print(compact(plain({"values": values, "changed": changed, "tensors": tensors, "not_compared": others})))
        return 0
    print(
        table(
            ("tensor", "dtype", "values", "changed", "largest difference"),
            [
                (name, dtype, count, _share(differ, count), "-" if most is None else f"{most:.3g}")
                for name, dtype, count, differ, most in rows
            ],
        )
    )
    print(f"together: {_share(changed, values)} of {values:,} values changed, by {largest:.3g} at most")
    for name in others:
        print(
            printable(
                f"not compared: {name}, which is missing in one version, or has different shapes or kinds of values"
            )
        )
    return 0


def roll_back_to(config: RunConfig, args: argparse.Namespace) -> int:
    """Publish a version again."""
    clients.check_broker(config.kafka)
    manifest = roll_back(
        config.kafka,
        config.run,
        args.version,
        reason=args.reason,
        by=args.by,
        take_over=args.take_over,
        config=config.learner.weights,
    )
    answer = {"run": config.run, "policy_version": manifest.version, "rollback_of": args.version}
    text = f"policy version {manifest.version} of run {config.run} has the parameters of version {args.version}"
    print(compact(answer) if args.json else text)
    return 0


# ---------------------------------------------------------------------- reading


def _published(config: RunConfig, whole: Collection[int] = ()) -> PublishedVersions:
    """Return the versions on record; only the manifests of versions in `whole` keep their tensors and chunks."""
    clients.check_broker(config.kafka)
    published = PublishedVersions(config, whole)
    tell(published.skipped)
    return published


class _Verifier:
    """Checks versions in ascending order, and holds the last whole version, on which the next may be based."""

    def __init__(self, fetcher: ChunkFetcher, manifests: Mapping[int, PolicyManifest], timeout_s: float) -> None:
        self._fetcher, self._manifests, self._timeout_s = fetcher, manifests, timeout_s
        self._held: tuple[int, Arrays] = (-1, {})
        self._memory = ReusedMemory()

    def check(self, version: int) -> str:
        """Return "whole", or the kind of fault and its reason."""
        try:
            arrays = load_version(
                self._fetcher,
                self._manifests,
                version,
                held=self._held,
                timeout_s=self._timeout_s,
                memory=self._memory,
            )
        except (ChainBroken, ChunksGone) as error:
            return f"missing: {error}"
        except ChunksLate as error:
            return f"unread: {error}"
        except WeightsRefused as error:
            return f"damaged: {error}"
        self._held = version, arrays
        return "whole"


def _fetch(config: RunConfig, *versions: int) -> list[dict[str, NDArray[Any]]]:
    """Fetch the arrays of versions. Raises TopicError, with the reason, if one cannot be fetched whole."""
    timeout_s, fetched = config.learner.weights.fetch_timeout_s, []
    manifests = read_whole(config, *versions)
    for number in versions:
        with fetching(config, number) as fetcher:
            fetched.append(load_version(fetcher, manifests, number, timeout_s=timeout_s))
    return fetched


# ---------------------------------------------------------------------- values


def _comparable(before: NDArray[Any], after: NDArray[Any]) -> bool:
    kinds = {"number" if array.dtype.kind in _NUMBERS else array.dtype.kind for array in (before, after)}
    return before.shape == after.shape and len(kinds) == 1


def _difference(before: NDArray[Any], after: NDArray[Any]) -> tuple[str, int, int, float | None]:
    """Return the dtypes, the number of values, how many differ (NaN equals NaN), and the largest difference of numbers;
    None for texts and times."""
    name = before.dtype.name if before.dtype == after.dtype else f"{before.dtype.name}, {after.dtype.name}"
    differ = (before != after) & ~((before != before) & (after != after))
    if before.dtype.kind not in _NUMBERS:
        return name, before.size, int(differ.sum()), None
    wide = np.complex128 if "c" in (before.dtype.kind, after.dtype.kind) else np.float64
    with np.errstate(invalid="ignore"):
        differences = np.abs(after[differ].astype(wide) - before[differ].astype(wide))
    return name, before.size, int(differ.sum()), float(differences.max(initial=0.0))


def _note_text(note: RollbackNote) -> str:
    return f"rollback to {note.source} by {note.by}: {note.reason}"


def _age_text(age_s: float) -> str:
    for size_s, unit in ((_DAY_S, "d"), (3600, "h"), (60, "min")):
        if age_s >= size_s:
            return f"{age_s / size_s:.1f} {unit}"
    return f"{age_s:.0f} s"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f} %" if whole else "-"
