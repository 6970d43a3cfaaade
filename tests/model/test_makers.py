"""A user's batch makers and estimators in a run: named in the configuration, imported by grouping and verify."""

import json
import signal
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.pipeline.audit.verification import verify
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.records import JournalRecord, TrainingBatch
from tests.support.objectives import SETTINGS, write_objectives
from tests.support.runs import RealRun, rollout
from tests.support.waiting import eventually
from tests.unit.consumers.grouping.core.test_plug_ins import CODE, MINE


@pytest.fixture
def module(real_run: RealRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the module of docs/grouping.md, on the path of this process and of those it starts."""
    (tmp_path / "my_makers.py").write_text("\n".join(CODE))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_makers", raising=False)
    real_run.python_path = (tmp_path,)
    return tmp_path


def test_a_run_batches_with_a_maker_of_the_user_s_and_is_verified_with_it(real_run: RealRun, module: Path) -> None:
    real_run.grouping = GroupingConfig(maker=MINE, batch_rollouts=16, max_batch_age_s=2.0)
    real_run.prepare()
    untold = real_run.start("group")
    assert untold.wait(300) == 2
    assert "must be named in grouper.makers" in real_run.log_of(untold)

    real_run.start("group", grouper__makers=f'["{MINE}"]')
    real_run.send(rollout(f"x{example}", member) for example in range(12) for member in range(4))
    eventually(lambda: sum(map(len, batches(real_run))) == 48, 60, "every rollout in a batch")
    assert {json.loads(batch.metadata)["maker"] for batch in batches(real_run)} == {"hardest_first"}
    assert verify(real_run.kafka, real_run.name, [MINE]).mismatches == []
    with pytest.raises(ConfigurationError, match=r"must be named in grouper\.makers"):
        verify(real_run.kafka, real_run.name)


def test_a_run_is_grouped_with_an_estimator_of_the_user_s_and_is_verified_with_it(
    real_run: RealRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named as on the page: by a file in the working directory."""
    write_objectives(real_run.directory)
    monkeypatch.chdir(real_run.directory)
    page = tomllib.loads(SETTINGS[0])
    name = page["grouping"]["estimator"]
    assert page["grouper"]["estimators"] == [name]
    real_run.grouping = GroupingConfig(estimator=name, batch_rollouts=16, max_batch_age_s=2.0)
    real_run.prepare()
    real_run.start("group", grouper__estimators=f'["{name}"]')
    real_run.send(
        rollout(f"x{example}", member, reward=4.0 * (member == 1)) for example in range(8) for member in range(4)
    )
    eventually(lambda: sum(map(len, batches(real_run))) == 32, 60, "every rollout in a batch")
    # The median is 0, and so is the deviation of most members, so that the scale counts as 1.
    actual = {float(a) for batch in batches(real_run) for a in batch.advantages[batch.loss_mask]}
    assert actual == {0.0, 4.0}
    assert verify(real_run.kafka, real_run.name, estimators=[name]).mismatches == []
    with pytest.raises(ConfigurationError, match=r"must be named in grouper\.estimators"):
        verify(real_run.kafka, real_run.name)


def test_a_reservoir_loses_and_repeats_nothing_when_its_process_is_killed_between_parts_of_groups(
    real_run: RealRun,
) -> None:
    real_run.grouping = GroupingConfig(
        maker="reservoir", estimator="reinforce_pp", batch_rollouts=10, max_batch_age_s=3.0, seed=7
    )
    real_run.prepare()
    first = real_run.start("group")
    for part in range(3):
        # Rewards 0, 1, 2 and 1: two of four have no advantage.
        real_run.send(
            rollout(f"x{part}-{example}", member, reward=float((0, 1, 2, 1)[member]))
            for example in range(13)
            for member in range(4)
        )
        if part == 0:
            eventually(lambda: len(batches(real_run)) >= 1, 60, "a batch before the kill")
            first.send_signal(signal.SIGKILL)
            first.wait()
            real_run.start("group")
    eventually(lambda: fates(real_run) == {"batched": 78, "zero_advantage": 78}, 60, "a fate for every rollout")
    uids = [uid for batch in batches(real_run) for uid in batch.uids]
    assert len(uids) == len(set(uids)) == 78
    assert verify(real_run.kafka, real_run.name).mismatches == []
    for batch in batches(real_run):
        trained = batch.advantages[batch.loss_mask].astype("<f8")
        assert abs(trained.mean()) < 1e-6
        # A last batch may hold rows of one advantage only.
        assert abs(trained.std() - 1) < 1e-6 or trained.std() == 0


def fates(run: RealRun) -> dict[str, int]:
    """Rollouts batched, and dropped by reason."""
    dropped = Counter(drop.reason for r in run.read("journal") if isinstance(r, JournalRecord) for drop in r.drops)
    return {"batched": sum(map(len, batches(run))), **dropped}


def batches(run: RealRun) -> list[TrainingBatch]:
    return [batch for batch in run.read("batches") if isinstance(batch, TrainingBatch)]
