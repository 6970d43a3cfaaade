"""Mutants: changes of one place that break a promise, each with the tests that have to notice it.

`python -m tests.mutants [NAME...]` applies each to a copy of the tree, runs these tests, and prints which mutants
survive. A mutant that no input can tell from the original does not belong here.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from tests.support.paths import ROOT

LEAST_KILLED = 0.95
_AT_ONCE = 2
_LONGEST_S = 600
_PASSED, _FAILED = 0, 1
"""Exit codes of pytest; any other code says that the tests did not run."""


class Mutant(NamedTuple):
    """A change of one place."""

    name: str
    file: str
    tests: tuple[str, ...]
    """Files and folders below `tests/unit`."""
    breaks: str
    old: str
    """Text that occurs once in the file."""
    new: str

    @property
    def problem(self) -> str:
        """Why it cannot be applied; empty if it can."""
        places = (ROOT / self.file).read_text().count(self.old) if (ROOT / self.file).exists() else 0
        missing = [test for test in self.tests if not (ROOT / "tests/unit" / test).exists()]
        if places != 1:
            return f"mutant {self.name}: {self.file} has its text {places} times, not once; mend its entry"
        return f"mutant {self.name}: tests/unit/{missing[0]} does not exist; mend its entry" if missing else ""


CORE = ("consumers/grouping/core", "consumers/grouping/makers")
PROCESS = ("consumers/grouping/process", "consumers/test_transactions.py")
WEIGHTS = ("consumers/weights",)
AUDIT = ("pipeline/audit/test_planted_lies.py", "pipeline/audit")
MACHINES = ("consumers/buffers/test_machines.py",)
LOSSES = ("consumers/learner/training/test_losses.py", "consumers/learner/training/test_loss.py")
# fmt: off
MUTANTS = (
    # -------------------- the fold
    Mutant("lag", "consumers/grouping/core/drop_rules.py", CORE, "a group is stale one version early",
           "if 0 <= config.max_policy_lag < lag:", "if 0 <= config.max_policy_lag <= lag:"),
    Mutant("age", "consumers/grouping/core/drop_rules.py", CORE, "a group is too old one millisecond early",
           "age_ms > milliseconds(config.max_age_s)", "age_ms >= milliseconds(config.max_age_s)"),
    Mutant("deadline", "consumers/grouping/core/drop_rules.py", CORE, "a deadline asks for one member more",
           "if group.complete_episodes >= least:", "if group.complete_episodes > least:"),
    Mutant("home", "consumers/grouping/core/drop_rules.py", CORE, "records on a wrong partition are grouped",
           "if home != partition:", "if False and home != partition:"),
    Mutant("key", "consumers/grouping/core/drop_rules.py", CORE, "records under a wrong key are grouped",
           "if record.key != key:", "if False and record.key != key:"),
    Mutant("variance", "consumers/grouping/core/drop_rules.py", CORE,
           "groups of equal rewards are dropped where settings keep them",
           "if max(rewards) == min(rewards) and not keeps:", "if max(rewards) == min(rewards):"),
    Mutant("admitted", "consumers/grouping/core/offset_tracker.py", CORE, "the journal admits finished offsets, too",
           "admitted=to_ranges(o for o in pending.admitted if o in self._unfinished),",
           "admitted=to_ranges(pending.admitted),"),
    Mutant("watermark", "consumers/grouping/core/offset_tracker.py", CORE,
           "a restore does not read unfinished records again",
           "watermark = self._order[0] if self._order else position", "watermark = position"),
    Mutant("horizon", "consumers/grouping/core/group_tables.py", CORE,
           "a finished group is forgotten one millisecond early",
           "while self._finished and self._finished[0][0] < self.since_ms:",
           "while self._finished and self._finished[0][0] <= self.since_ms:"),
    Mutant("shedding", "consumers/grouping/core/group_lifecycle.py", CORE, "nothing is shed when a rollout joins",
           "            self._seal(group)\n"
           "        self._shed(key.environment)\n"
           "\n"
           "    def cancel",
           "            self._seal(group)\n"
           "\n"
           "    def cancel"),
    Mutant("rates", "consumers/grouping/core/group_lifecycle.py", CORE, "a restore counts rates again",
           "if quota is None or not self._replay.ended:", "if quota is None:"),
    Mutant("restored-time", "consumers/grouping/core/task_state.py", CORE, "a restore does not compare stream time",
           "if reached != recorded:", "if reached[1:] != recorded[1:]:"),
    Mutant("awaited", "consumers/grouping/core/task_state.py", CORE, "a restore does not miss unfinished records",
           "if self._awaited:", "if False:"),
    Mutant("marks", "consumers/grouping/core/fold.py", CORE, "a restore obeys marks that were refused",
           "            if not outcome.problem:\n"
           "                self._obey(mark, outcome.config)",
           "            self._obey(mark, outcome.config)"),
    Mutant("replayed", "consumers/grouping/core/held_rollouts.py", CORE,
           "batches have no experts and sampling masks unless settings name them",
           "(REFERENCE, *REPLAYED, *token_arrays)", "(REFERENCE, *token_arrays)"),
    Mutant("masked", "topics/wire/validation.py", CORE, "masks need not be of every sampled token",
           "[loss_mask] > 0).all()", "[loss_mask] >= 0).all()"),
    Mutant("certainty", "consumers/grouping/core/rollout_reader.py", CORE, "rollouts are read without all checks",
           ">= _LEAST_BITS", "> _LEAST_BITS"),
    Mutant("policy-clock", "consumers/grouping/core/fold.py", CORE, "the policy clock goes back",
           "if mark.policy_version > self.policy_version:", "if True:"),
    Mutant("scale", "consumers/grouping/core/estimators.py", CORE, "advantages are normalized in another way",
           "scale = math.sqrt(max(math.fsum(squares) / total, EPSILON))",
           "scale = math.sqrt(math.fsum(squares) / total + EPSILON)"),
    Mutant("batch-size", "consumers/grouping/makers/batch_maker.py", CORE, "a batch takes one group too many",
           "while self._waiting and len(batch) < batch_size:", "while self._waiting and len(batch) <= batch_size:"),
    Mutant("batch-bytes", "consumers/grouping/makers/batch_maker.py", CORE, "a batch may not be as large as the limit",
           "if batch and size_bytes > self.context.batch_bytes:",
           "if batch and size_bytes >= self.context.batch_bytes:"),
    # -------------------- processes and transactions
    Mutant("suspended", "consumers/grouping/process/task_manager.py", PROCESS,
           "a suspended task goes on although another process committed",
           "if self._last_journal(partition) == self._suspended[partition].journal_offset:", "if True:"),
    Mutant("seek", "consumers/grouping/process/task_manager.py", PROCESS, "records past a gap are folded",
           "if task is not None and self._seeks.confirm(record.partition, record.offset):", "if task is not None:"),
    Mutant("seek-wanted", "consumers/grouping/process/task_manager.py", PROCESS, "records before the seek are folded",
           "return None if partition in self._seeks or partition in self._paused else self._tasks.get(partition)",
           "return None if partition in self._paused else self._tasks.get(partition)"),
    Mutant("settling", "consumers/grouping/process/committer.py", PROCESS,
           "a transaction begins before the one before it has ended",
           "        self.settle()\n"
           "        commits = [task",
           "        commits = [task"),
    Mutant("position", "consumers/grouping/process/committer.py", PROCESS,
           "the watermark is committed in place of the position",
           "journal.position,\n"
           "                    metadata.encode()",
           "journal.watermark,\n"
           "                    metadata.encode()"),
    Mutant("versions", "consumers/grouping/process/punctuator.py", PROCESS, "marks take the policy clock back",
           "self._newest_version = max(self._newest_version, manifest.version)",
           "self._newest_version = manifest.version"),
    Mutant("rival", "consumers/transactions.py", PROCESS,
           "a process that was paused takes its ordinal from its replacement",
           "        if self.has_rival:\n", "        if False:\n"),
    Mutant("claim", "consumers/ordinal_claim.py", PROCESS, "a process takes an expired claim for that of a rival",
           "return newest.offset < 0 or newest.metadata == self._token", "return newest.metadata == self._token"),
    # -------------------- weights
    Mutant("go-back", "consumers/weights/follower.py", WEIGHTS, "a follower goes back to an older version",
           "self._candidates.drop_up_to(manifest.version)", "self._candidates.drop(manifest.version)"),
    Mutant("older", "consumers/weights/follower.py", WEIGHTS, "a follower goes back to a version published late",
           "elif manifest.version > held:", "else:"),
    Mutant("caught-up", "consumers/weights/follower.py", WEIGHTS,
           "a follower fetches before it knows the newest version",
           "        if self._place not in self._policies.caught_up:\n"
           "            return None",
           "        if False:\n"
           "            return None"),
    Mutant("places", "consumers/weights/delta.py", WEIGHTS, "a delta names a place twice",
           "(gaps[1:] <= 0).any()", "(gaps[1:] < 0).any()"),
    Mutant("refused", "consumers/weights/chains.py", WEIGHTS, "a version builds on a refused one",
           "        if wanted in refused:\n"
           '            raise ChainBroken(f"policy version {version} builds on version {wanted}, which was refused")\n',
           ""),
    Mutant("base", "consumers/weights/chains.py", WEIGHTS, "a delta is applied to another version than its base",
           "manifest.base == held >= 0", "held >= 0"),
    # -------------------- ledger
    Mutant("unread", "pipeline/audit/ledger/rollouts.py", AUDIT, "one rollout deleted unread is not named",
           "if begin > journal.position and not journal.hidden:",
           "if begin > journal.position + 1 and not journal.hidden:"),
    Mutant("without-fate", "pipeline/audit/ledger/rollouts.py", AUDIT, "a record without a fate is not named",
           "for offset, _fate in self._journal.named(self._nowhere):",
           "for offset, _fate in self._journal.named(self._nowhere, 0):"),
    Mutant("double-entry", "pipeline/audit/ledger/index.py", AUDIT, "a doubled index entry is not named",
           "            if first is not None:\n", "            if first is not None and False:\n"),
    Mutant("entry-place", "pipeline/audit/ledger/index.py", AUDIT, "an index entry that points elsewhere is not named",
           "if table.place(partition, number) == tuple(place):", "if True:"),
    Mutant("counts", "pipeline/audit/ledger/proof.py", AUDIT, "counts that disagree are not named",
           "if open_by_environments != in_flight:", "if False:"),
    Mutant("double-row", "pipeline/audit/ledger/batches.py", AUDIT, "an offset in two batches is not named",
           "if count + before > 1:", "if count > 1:"),
    Mutant("eval-batched", "pipeline/audit/ledger/batches.py", AUDIT, "an evaluation in a batch is not named",
           "for uid in evals.intersection(batch.uids):", "for uid in ():"),
    Mutant("double-letter", "pipeline/audit/ledger/dead_letters.py", AUDIT,
           "two dead letters of a record are not named",
           "if journals[number].table.set_bits_at(offset, LETTERED) & LETTERED:",
           "if journals[number].table.set_bits_at(offset, LETTERED) & 0:"),
    Mutant("used-twice", "pipeline/audit/ledger/learners.py", AUDIT,
           "rows trained on after they were skipped are not named",
           'rows & (used["trained"] | used["skipped"])', 'rows & used["trained"]'),
    Mutant("passed-by", "pipeline/audit/ledger/learners.py", AUDIT, "one batch passed by is not named",
           "if past and step.stream_time_ms < 0:", "if len(past) > 1 and step.stream_time_ms < 0:"),
    Mutant("session", "pipeline/audit/ledger/calls.py", AUDIT, "a session's missing rollout is not named",
           "for uid, session in sorted(self._unseen.items()):",
           "for uid, session in sorted(self._unseen.items())[1:]:"),
    Mutant("labels", "pipeline/audit/ledger/trajectories.py", AUDIT, "a label that no position counts is not named",
           "if present > counted or (present < counted and not pruned):", "if present < counted and not pruned:"),
    Mutant("balance", "pipeline/audit/ledger/book.py", AUDIT, "a ledger with problems is balanced",
           "return not self.problems and whole", "return whole"),
    Mutant("journal-counts", "pipeline/audit/partition_journal.py", AUDIT,
           "a journal that counts more than it names is not named",
           "if followed[fate] != grown[fate]:", "if followed[fate] > grown[fate]:"),
    Mutant("two-fates", "pipeline/audit/partition_journal.py", AUDIT, "a record with two fates is not named",
           "again = (before > _IN_FLIGHT_CODE) |", "again = (before < 0) |"),
    # -------------------- verify, lineage and attestation
    Mutant("carried", "pipeline/audit/verification.py", AUDIT, "verify trusts the digest that a batch carries",
           "    if digest != batch.digest:\n", "    if False:\n"),
    Mutant("one-mismatch", "pipeline/audit/verification.py", AUDIT, "verify names one difference of a partition",
           "self.mismatches += other.mismatches", "self.mismatches += other.mismatches[:1]"),
    Mutant("refolded", "pipeline/audit/verification.py", AUDIT, "verify compares no batch",
           "elif recorded[batch.batch_id] != batch.digest:", "elif False:"),
    Mutant("refolded-some", "pipeline/audit/verification.py", AUDIT, "verify compares no batch that was asked for",
           "if recorded[batch.batch_id] not in (None, batch.digest):", "if False:"),
    Mutant("drops", "pipeline/audit/verification.py", AUDIT, "verify does not name a drop left out of the journal",
           "for drop in sorted(recorded ^ folded)", "for drop in sorted(recorded - folded)"),
    Mutant("not-cut", "pipeline/audit/verification.py", AUDIT,
           "verify does not name a batch that the fold does not cut",
           "for batch_id in sorted(recorded.keys() - met):", "for batch_id in sorted(met - recorded.keys()):"),
    Mutant("other-batch", "pipeline/index/indexed_run.py", ("pipeline/audit", "pipeline/tools"),
           "lineage shows another batch than the index names",
           "return batch if batch.batch_id == batch_id else None", "return batch"),
    Mutant("attested", "pipeline/audit/attestation/evidence.py", AUDIT,
           "an attestation trusts the digest that a batch carries",
           "        if digest != batch.digest:\n", "        if False:\n"),
    Mutant("leaves", "pipeline/audit/attestation/trees.py", AUDIT, "a node of the tree passes for an entry",
           "blake3(_NODE + left + right", "blake3(left + right"),
    # -------------------- learner
    Mutant("clip", "consumers/learner/training/surrogates.py", LOSSES,
           "the upper clip is wrong",
           "within = jnp.clip(ratio, 1.0 - recipe.clip_low, 1.0 + recipe.clip_high)",
           "within = jnp.clip(ratio, 1.0 - recipe.clip_low, 1.0 + recipe.clip_low)"),
    Mutant("first-token", "consumers/learner/training/packing.py", ("consumers/learner/training/test_packing.py",),
           "a first token is trained on",
           "        mask[row, begin] = False\n", ""),
    Mutant("learner-lag", "consumers/learner/input/batch_selection.py", ("consumers/learner/input",),
           "a batch is stale one step early",
           "if lag > self._max_policy_lag:", "if lag >= self._max_policy_lag:"),
    Mutant("short-step", "consumers/learner/input/batch_selection.py", ("consumers/learner/input",),
           "a short step loses its last batch when executed again",
           "self._index.position <= last:", "self._index.position < last:"),
    Mutant("proximal", "consumers/learner/training/loss.py", LOSSES,
           "the proximal policy is ignored",
           'if decoupled and "proximal_log_probs" in batch:', 'if False and "proximal_log_probs" in batch:'),
    Mutant("uses", "consumers/learner/records/step_recorder.py",
           ("consumers/learner/records/test_replay_comparison.py",),
           "a step on other batches passes for the recorded one",
           "if (recorded.params_digest, recorded.uses) == (digest, uses):", "if recorded.params_digest == digest:"),
    # -------------------- gateway and evaluator
    Mutant("shared-token", "producers/episodes/branches.py", ("producers/episodes", "producers/gateway"),
           "a token shared by branches is trained on twice",
           "trained = not sample.trained", "trained = True"),
    Mutant("token-reward", "producers/gateway/episode_rollouts.py", ("producers/gateway",),
           "a token's reward is one early",
           "values[place.stop - 1] = rewards", "values[place.stop - 2] = rewards"),
    Mutant("takeover", "producers/gateway/sessions.py", ("producers/gateway",),
           "a gateway takes over one millisecond late",
           "intent.append_ms >= current.append_ms + takeover_ms", "intent.append_ms > current.append_ms + takeover_ms"),
    Mutant("late-call", "producers/gateway/sessions.py", ("producers/gateway",),
           "a call after the end joins the rollout",
           "        if self.closed or self.finished or self.ended:\n"
           "            self.late_calls",
           "        if self.closed or self.finished:\n"
           "            self.late_calls"),
    Mutant("group-version", "producers/gateway/sessions.py", ("producers/gateway",),
           "a group has several policy versions",
           "version = record.policy_version if first is None else first.policy_version",
           "version = record.policy_version"),
    Mutant("finished-twice", "producers/gateway/sessions.py", ("producers/gateway",),
           "the second end of a session replaces the first",
           "        if self.finished is None:\n"
           "            self._settled",
           "        if True:\n"
           "            self._settled"),
    Mutant("half-evaluated", "producers/worker/evaluator.py", ("producers/worker/test_evaluator.py",),
           "an evaluation cut short is never completed",
           "if len(episodes) >= needed[name, version]}", "if episodes}"),
    Mutant("overtaken", "producers/worker/evaluator.py", ("producers/worker/test_evaluator.py",),
           "an overtaken version is evaluated",
           "if waiting and waiting[-1] > newest:", "if waiting:"),
    # -------------------- labeler
    Mutant("refused-labels", "consumers/labeling/process.py", AUDIT,
           "committed counts lack dead letters",
           "dead_lettered=before.dead_lettered + len(self.refused),", "dead_lettered=before.dead_lettered,"),
    Mutant("source", "consumers/labeling/process.py", AUDIT, "a label names another source",
           'f"{part.partition}:{labeled.offset}"', 'f"{part.partition}:{part.position}"'),
    Mutant("finite", "consumers/labeling/labeler.py", ("consumers/labeling",), "a label is infinite",
           "if not math.isfinite(finite):", "if math.isnan(finite):"),
    Mutant("label-signature", "consumers/labeling/labeler.py", ("consumers/labeling",),
           "a labeler vouches for an unsigned rollout",
           'if keys and not is_signed_by(record.value or b"", ROLLOUT, keys):', "if False:"),
    # -------------------- buffers and archive
    Mutant("exact-fit", "consumers/buffers/rollouts/buffer.py", ("consumers/buffers/rollouts",),
           "a sample of all rollouts is refused",
           "if len(self._shelf) < count * self.total_processes:",
           "if len(self._shelf) <= count * self.total_processes:"),
    Mutant("added-twice", "consumers/buffers/rollouts/buffer.py", ("consumers/buffers/rollouts",),
           "a batch is added twice",
           "if read.index_offset < self._position.get(0, 0):", "if read.index_offset < self._position.get(0, 0) - 1:"),
    Mutant("capacity-late", "consumers/buffers/rollouts/shelf.py", MACHINES, "one rollout too many of an environment",
           "if (over := len(held) - self.rules.capacity) > 0:", "if (over := len(held) - self.rules.capacity) > 1:"),
    Mutant("window-wide", "consumers/buffers/trajectories/index.py", MACHINES, "a window has one trajectory too many",
           "first = max(0, len(self) - size) if size else 0", "first = max(0, len(self) - size - 1) if size else 0"),
    Mutant("record-again", "consumers/buffers/slices/state.py", MACHINES, "a record of the log is stored twice",
           "self.position[partition] = offset + 1", "self.position[partition] = offset"),
    Mutant("sealed-early", "consumers/buffers/groups/open_groups.py", MACHINES, "a group seals with one too few",
           "return self._seal(key, now) if self._size(key, group) >= enough else None",
           "return self._seal(key, now) if self._size(key, group) + 1 >= enough else None"),
    Mutant("torn", "consumers/buffers/storage/journal.py",
           ("consumers/buffers/storage/test_journal.py", "consumers/buffers/trajectories/test_directory.py"),
           "damage passes for a torn append",
           "self._stop + place, bool(later), closed", "self._stop + place, False, closed"),
    Mutant("incomplete", "consumers/archive/completeness.py", ("consumers/archive",),
           "an archive that lacks rollouts is restored",
           "if journal.position > position:", "if False:"),
    Mutant("lacks-batch", "consumers/archive/completeness.py", ("consumers/archive",),
           "an archive that lacks its last batch is restored",
           "elif batches is not None and journal.batch_number > batches:",
           "elif batches is not None and journal.batch_number > batches + 1:"),
    Mutant("restored-end", "consumers/archive/restorer.py", ("consumers/archive",),
           "a record written into a restored run is not noticed",
           "            if end != archived:\n", "            if end < archived:\n"),
    # -------------------- digests and signatures
    Mutant("shape", "topics/wire/params_digest.py", ("topics/wire",),
           "a digest does not depend on shapes",
           'f"{name}\\0{dtype}\\0{list(shape)}\\0{content}\\0"', 'f"{name}\\0{dtype}\\0{content}\\0"'),
    Mutant("batch-digest", "topics/wire/rl_examples.py", ("topics/test_batch_digest.py",),
           "a batch's digest does not depend on its rewards",
           'replace(batch, digest="")', 'replace(batch, digest="", rewards=batch.rewards[:0])'),
    Mutant("mark-context", "topics/wire/signatures.py", ("topics/wire/test_signatures.py", *CORE),
           "a signed mark is valid on every partition",
           'return _MARK + partition.to_bytes(4, "big")', "return _MARK"),
)
# fmt: on


def main(names: Sequence[str]) -> int:
    """Apply the named mutants, all by default; return 1 unless enough are killed, 2 if the run shows nothing."""
    unknown = set(names) - {mutant.name for mutant in MUTANTS}
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    problems = [f"no mutant is named {name}" for name in sorted(unknown)] + [m.problem for m in chosen if m.problem]
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(_AT_ONCE) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(_AT_ONCE):
            copies.put(copied(Path(folder, str(number))))
        tests = sorted({test for mutant in chosen for test in mutant.tests})
        for test, (code, output, _took_s) in zip(tests, pool.map(lambda t: passes(copies, [t]), tests), strict=True):
            if code != _PASSED:
                print(f"{output}\ntests/unit/{test} fails without a mutant, so it shows nothing", file=sys.stderr)
                return 2
        print("the tests pass without a mutant", flush=True)
        survivors = [
            mutant
            for mutant, killed in zip(chosen, pool.map(lambda m: is_killed(copies, m), chosen), strict=True)
            if not killed
        ]
    killed = len(chosen) - len(survivors)
    left = " ".join(mutant.name for mutant in survivors) or "none"
    print(f"{killed} of {len(chosen)} mutants killed ({killed / len(chosen):.0%}); survivors: {left}")
    return int(killed < LEAST_KILLED * len(chosen))


def copied(into: Path) -> Path:
    """Copy the files that git does not ignore, so that the checkout stays as it is."""
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True
    )
    for name in listed.stdout.decode().split("\0"):
        source, target = ROOT / name, into / name
        if name and (source.is_symlink() or source.is_file()):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    subprocess.run(["git", "init", "-q"], cwd=into, check=True)  # Some tests ask git for the files of the repository.
    return into


def is_killed(copies: "SimpleQueue[Path]", mutant: Mutant) -> bool:
    """Whether the mutant's tests fail in a copy with the mutant."""
    code, output, took_s = passes(copies, mutant.tests, mutant)
    if code not in (_PASSED, _FAILED):
        raise SystemExit(f"{output}\nthe tests of mutant {mutant.name} did not run: pytest exited with {code}")
    first = next((line for line in output.splitlines() if line.startswith("FAILED ")), "").removeprefix("FAILED ")
    outcome = f"killed by {first.partition(' - ')[0]}" if code == _FAILED else "SURVIVED"
    print(f"{mutant.name}: {outcome} ({took_s:.0f} s): {mutant.breaks}", flush=True)
    return code == _FAILED


def passes(copies: "SimpleQueue[Path]", tests: Iterable[str], mutant: Mutant | None = None) -> tuple[int, str, float]:
    """Run tests in a copy, with a mutant if there is one; return the exit code of pytest, its output and the time."""
    root, began = copies.get(), time.monotonic()
    try:
        if mutant is not None:
            text = (ROOT / mutant.file).read_text()
            (root / mutant.file).write_text(text.replace(mutant.old, mutant.new))
            # Python takes equal size and time for equal content, and the next mutant may follow within a second.
            os.utime(root / mutant.file, (MUTANTS.index(mutant) + 1,) * 2)
        words = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not long", "-p", "no:cacheprovider"]
        environment = {**os.environ, "PYTHONPATH": str(root / "src")}
        try:
            done = subprocess.run(
                [*words, *(f"tests/unit/{test}" for test in tests)],
                cwd=root,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
                timeout=_LONGEST_S,
            )
        except subprocess.TimeoutExpired:
            return _FAILED, f"FAILED no answer within {_LONGEST_S} s", time.monotonic() - began
        return done.returncode, done.stdout, time.monotonic() - began
    finally:
        if mutant is not None:
            shutil.copy2(ROOT / mutant.file, root / mutant.file)
        copies.put(root)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
