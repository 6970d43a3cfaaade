"""A batch maker of the user's in a run: named in the configuration, imported by grouping and by verification only."""

import json
import os
import sys
from pathlib import Path

import pytest

from consumers.grouping.config import GroupingConfig
from pipeline.verify import verify
from tests.documentation import ROOT
from tests.runs import RealRun, rollout
from tests.unit.consumers.grouping.test_makers import CODE, MINE
from tests.waiting import eventually
from topics.errors import ConfigurationError
from topics.records import TrainingBatch


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the module of docs/batch-makers.md, on the path of this process and of those it starts."""
    (tmp_path / "my_makers.py").write_text("\n".join(CODE))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_makers", raising=False)
    monkeypatch.setattr(
        RealRun, "_env", lambda _run: {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    )
    return tmp_path


def test_a_run_batches_with_a_maker_of_the_user_s_and_is_verified_with_it(real_run: RealRun, module: Path) -> None:
    real_run.grouping = GroupingConfig(maker=MINE, batch_rollouts=16, max_batch_age_s=2.0)
    real_run.prepare()
    untold = real_run.start("group")
    assert untold.wait(60) == 2
    assert "must be named in grouper.makers" in real_run.log_of(untold)

    real_run.start("group", grouper__makers=f'["{MINE}"]')
    real_run.send(rollout(f"x{example}", member) for example in range(12) for member in range(4))
    eventually(lambda: sum(map(len, batches(real_run))) == 48, 60, "every rollout in a batch")
    assert {json.loads(batch.metadata)["maker"] for batch in batches(real_run)} == {"hardest_first"}
    assert verify(real_run.kafka, real_run.name, [MINE]).mismatches == []
    with pytest.raises(ConfigurationError, match=r"must be named in grouper\.makers"):
        verify(real_run.kafka, real_run.name)


def batches(run: RealRun) -> list[TrainingBatch]:
    return [batch for batch in run.read("batches") if isinstance(batch, TrainingBatch)]
