"""Drops that an exclusion is found to have caused, and the replay that it proposes."""

import shlex
from argparse import Namespace

import pytest

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.pipeline.config import RunConfig, load
from rollstream.pipeline.tools import exclude
from rollstream.pipeline.tools.exclude import ExclusionReport, journal_details
from rollstream.pipeline.tools.exclusion_marks import Exclusion
from tests.support.pairs import driver, pair

LONG = "n" * 290


@pytest.mark.parametrize("name", ["addition", "a is excluded", "two\nlines", LONG])
def test_a_group_dropped_for_its_environment_is_known_by_whatever_name(name: str) -> None:
    d = driver(exclude_environments=(name,))
    pair(d, environment=name)
    assert [drop.reason for drop in d.drops] == ["excluded"] * 2
    for drop in d.drops:
        assert drop.detail in journal_details(Exclusion(environments=(name,)), ())
        assert drop.detail not in journal_details(Exclusion(environments=("another",), workers=(name,)), ())


def test_a_group_dropped_for_an_offset_is_known_by_it() -> None:
    d = driver(exclude_offsets=("0:0",))
    pair(d)
    for drop in d.drops:
        assert drop.detail in journal_details(Exclusion(offsets=("0:0",)), {0})
        assert drop.detail not in journal_details(Exclusion(offsets=("0:7",)), {7})


@pytest.mark.parametrize(
    "workers",
    [("it's",), ("a'b'c", 'say "x"'), ("\U0001f600",), ("\x7f\x1b[31m\u202e", "\U000e0067\n"), ("back\\slash $HOME",)],
)
def test_the_proposed_replay_excludes_the_same_names_whatever_they_are(
    workers: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = exclude.ExclusionOutcome(GroupingConfig(), ExclusionReport())
    monkeypatch.setattr(exclude, "put_on_record", lambda *_, **__: outcome)
    args = Namespace(env=[], worker=list(workers), offsets=[], unseen=False, dry_run=True, timeout=1.0, json=False)
    assert exclude.exclude(RunConfig(run="main"), args) == 0
    command = capsys.readouterr().out.partition("a replay without them:\n")[2]
    assert all(c.isprintable() for c in command.replace("\n", ""))
    *words, flag, setting = shlex.split(command.replace(" \\\n", " "))
    assert (words, flag) == (["rollstream", "replay", "--run", "main"], "--set")
    assert load(flags=[setting]).grouping.exclude_workers == workers
