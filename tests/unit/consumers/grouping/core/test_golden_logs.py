"""Golden logs: what the fold makes of logs drawn from seeds, by three oracles that fail fast.

The digests beside this file are those of the fold when they were written: a change of any batch, drop, fate or
deadline is seen. A crash after any record changes nothing. The auditor's model of grouping, which shares no code with
the fold, expects the same of the logs that it knows. After an intended change of the fold:
`python -m tests.unit.consumers.grouping.core.test_golden_logs` writes the digests again; review which ones differ.
"""

import json
from dataclasses import replace
from pathlib import Path
from random import Random

from blake3 import blake3

from rollstream.consumers.grouping.core.estimators import ESTIMATORS
from rollstream.consumers.grouping.core.plug_ins import MAKERS
from rollstream.consumers.grouping.testing import GroupingTestDriver
from rollstream.topics.records.journal import from_ranges
from tests import strategies as draw
from tests.faults.evidence import Raw
from tests.faults.model import GIVEN, NotModelled, refold
from tests.strategies import Arrival, Log, Marked, Poison

DIGESTS = Path(__file__).with_name("golden_logs.json")
LOGS = 140
MODELLED = 80
STEPS = 40
KNOWN_SETTINGS = {
    "maker": "fifo",
    "estimator": "rloo",
    "max_age_s": -1.0,
    "drop_superseded": False,
    "quotas": (),
    "exclude_environments": (),
    "exclude_workers": (),
    "exclude_offsets": (),
    "batch_bytes": 10**6,
    "capacity_bytes": 10**7,
    "remembered_bytes": 10**7,
    "horizon_s": 3_600.0,
}
"""Settings that the auditor's model knows."""


def drawn(seed: int) -> Log:
    """The log of a seed; makers and estimators take turns."""
    random = Random(seed)
    makers, estimators = tuple(MAKERS), tuple(ESTIMATORS)
    config = replace(
        random.choice(draw.config_table(makers)),
        maker=makers[seed % len(makers)],
        estimator=estimators[seed // len(makers) % len(estimators)],
    )
    steps = random.choices(draw.step_table(makers), k=STEPS)
    return Log.of(config, [(events, random.choice(("", "", "commit", "snapshot"))) for events in steps])


def folded(log: Log, crashes: frozenset[int] = frozenset(), skipped: int | None = None) -> GroupingTestDriver:
    """The driver after the log, with crashes after the records of these numbers."""
    driver = GroupingTestDriver(log.config, draw.PARTITION, draw.PARTITIONS, policy_version=log.policy_version)
    if skipped is not None:
        driver.skip(skipped, "by command")
    for number, (record, act) in enumerate(zip(log.records(), log.then, strict=True)):
        driver.pipe(record)
        if number in crashes:
            driver.crash_and_restore()
        elif act:
            driver.commit(snapshot=act == "snapshot")
    return driver


def digest(driver: GroupingTestDriver) -> str:
    """Digest of everything that others see of a fold, wherever its transactions were cut."""
    journal = driver.journal
    seen = (
        [(batch.batch_id, batch.digest) for batch in driver.batches],
        [repr(drop) for drop in driver.drops],
        [(letter.record.offset, letter.error) for letter in driver.dead_letters],
        [repr(group) for record in journal for group in record.finished_groups],
        sorted(
            (offset, finished.fate)
            for record in journal
            for finished in record.finished
            for offset in from_ranges(finished.runs)
        ),
        (journal[-1].watermark, journal[-1].position, driver.fold.next_deadline_ms),
    )
    return blake3(json.dumps(seen).encode()).hexdigest(length=8)


def skipped_in(seed: int) -> int | None:
    """Every fifth log has a record skipped by command."""
    return seed % 40 if seed % 5 == 0 else None


def test_the_fold_makes_of_drawn_logs_what_it_made_when_their_digests_were_written() -> None:
    for seed, expected in enumerate(json.loads(DIGESTS.read_text())):
        assert digest(folded(drawn(seed), skipped=skipped_in(seed))) == expected, f"the log of seed {seed}"


def test_crashes_after_any_records_change_nothing() -> None:
    for seed, expected in enumerate(json.loads(DIGESTS.read_text())[:MODELLED]):
        log, random = drawn(seed), Random(-seed)
        crashes = frozenset(random.sample(range(len(log.events)), 4))
        crashed = digest(folded(log, crashes, skipped_in(seed)))
        assert crashed == expected, f"the log of seed {seed}, with crashes after records {sorted(crashes)}"


def test_the_auditors_model_expects_the_same_batches_drops_and_fates() -> None:
    judged = 0
    for seed in range(MODELLED):
        log = drawn(seed)
        known = [
            event
            for event in log.events
            if isinstance(event.what, Arrival | Poison)
            or (isinstance(event.what, Marked) and event.what.kind != "configuration")
        ]
        log = replace(log, config=replace(log.config, **KNOWN_SETTINGS), events=tuple(known), then=("",) * len(known))
        driver = folded(log)
        records = [Raw(0, *record) for record in driver.log]
        given = {drop.offset: drop.reason for drop in driver.drops if drop.reason in GIVEN}
        try:
            expected = refold(records, driver.end, json.loads(log.config.to_json()), log.policy_version, given)
        except NotModelled:
            continue
        judged += 1
        where = f"the log of seed {seed}"
        assert [[*map(int, batch.source_offsets)] for batch in driver.batches] == [
            offsets for _why, offsets in expected.batches
        ], where
        assert {drop.offset: drop.reason for drop in driver.drops} == expected.drops, where
        assert {letter.record.offset for letter in driver.dead_letters} == expected.dead, where
    assert judged > MODELLED * 0.9


if __name__ == "__main__":
    DIGESTS.write_text(
        json.dumps([digest(folded(drawn(seed), skipped=skipped_in(seed))) for seed in range(LOGS)], indent=0)
    )
