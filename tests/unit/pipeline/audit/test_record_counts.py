"""Counts of records: the same for the ledger and for a snapshot of a run, in the JSON that programs read."""

from rollstream.pipeline.audit.ledger.book import Ledger
from rollstream.pipeline.run.run_statistics import RunSnapshot

FATES = {"dropped:late": 2, "batched": 5, "control": 1, "dropped:capacity": 3, "dead_lettered": 4}


def test_counts_by_fate_have_their_places_in_both() -> None:
    for counts in (Ledger(in_flight=6, unread=7), RunSnapshot(run="x", in_flight=6, unread=7)):
        counts.place(FATES)
        assert (counts.batched, counts.dead_lettered, counts.control) == (5, 4, 1)
        assert list(counts.dropped.items()) == [("capacity", 3), ("late", 2)]
        assert counts.placed == 5 + 5 + 4 + 1 + 6 + 7


def test_a_ledger_balances_when_every_record_produced_is_placed() -> None:
    book = Ledger(produced=21, unread=6)
    book.place(FATES)
    assert book.balanced
    book.unread += 1
    assert not book.balanced


def test_programs_find_the_names_they_know() -> None:
    # fmt: off
    assert list(RunSnapshot(run="x").as_dict()) == [
        "run", "seconds", "quiet_s", "produced", "rollouts", "batched", "batches", "trained", "skipped", "dropped",
        "dead_lettered", "control", "in_flight", "unread", "waiting", "step", "policy_version", "policy_age_s",
        "sampled_version", "rollouts_per_s", "read_per_s", "batches_per_s", "steps_per_s", "policies_per_s", "reward",
        "success", "rewards", "successes", "staleness", "records_skipped", "history", "history_left",
        "waiting_for_labels", "read_by_labelers", "paused", "paused_environments", "flat_environments", "wanted",
        "components", "stalled_stage", "stalled", "configuration", "quiet",
    ]
    assert Ledger().as_dict().keys() == {
        "balanced", "tokens", "produced", "rollouts", "batched", "batches", "trained", "skipped", "skipped_as", "steps",
        "dropped", "dead_lettered", "control", "in_flight", "unread", "evals", "evals_batched", "evaluations",
        "pruned", "learners", "unlabelled", "trajectories", "calls", "environments",
        "selection", "configurations", "records_skipped", "unreadable", "undecided", "problems",
    }
    # fmt: on
