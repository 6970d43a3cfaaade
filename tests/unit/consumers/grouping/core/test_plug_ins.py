"""Estimators that a process knows and imports, and names that it never imports; runs the code of docs/losses.md."""

import sys
from pathlib import Path

import numpy as np
import pytest

from rollstream.consumers.grouping.config import GrouperConfig, GroupingConfig
from rollstream.consumers.grouping.core import task_state
from rollstream.consumers.grouping.core.configuration_marks import check_names
from rollstream.consumers.grouping.core.estimators import ESTIMATORS, Estimator
from rollstream.consumers.grouping.core.fold import Fold
from rollstream.consumers.grouping.core.plug_ins import MAKERS, PlugIns, load_makers, load_plug_ins
from rollstream.consumers.grouping.testing import GroupingTestDriver, example_rollout
from rollstream.topics.errors import ConfigurationError, StateRefused
from rollstream.topics.records import Mark
from tests.support.objectives import ESTIMATOR, write_objectives
from tests.support.pages import blocks, page, section
from tests.support.pairs import pair, uids


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder outside the packages with the module of the page, importable, and not yet imported."""
    write_objectives(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_objectives", raising=False)
    return tmp_path


def test_a_users_estimator_is_reached_by_configuration(folder: Path) -> None:
    plug_ins = load_plug_ins(GrouperConfig(estimators=(ESTIMATOR,)))
    assert set(plug_ins.estimators) == {*ESTIMATORS, ESTIMATOR}
    config = GroupingConfig(estimator=ESTIMATOR, batch_rollouts=4)
    check_names(config, plug_ins)
    driver = GroupingTestDriver(config, estimators={ESTIMATOR: plug_ins.estimators[ESTIMATOR]})
    for uid, reward in zip("abcd", (4.0, 1.0, 0.0, 1.0), strict=True):
        driver.pipe(example_rollout(uid, reward, group_size=4))
        driver.commit()
        driver.crash_and_restore()
    (batch,) = driver.batches
    rewards = np.array([4.0, 1.0, 0.0, 1.0])
    spread = np.median(np.abs(rewards - np.median(rewards)))
    expected = (rewards - np.median(rewards)) / max(spread, 1.0)
    assert batch.advantages.reshape(4, 4)[:, 0].tolist() == pytest.approx(expected.tolist())


def test_an_estimator_in_a_file_is_one_too(folder: Path) -> None:
    name = f"{folder / 'my_objectives.py'}:{ESTIMATOR.partition(':')[2]}"
    assert name in load_plug_ins(GrouperConfig(estimators=(name,))).estimators


def test_the_log_cannot_have_an_estimators_module_imported(folder: Path) -> None:
    driver = GroupingTestDriver()
    config = GroupingConfig(generation=1, estimator=ESTIMATOR)
    mark = Mark(kind="configuration", generation=1, configuration=config.to_json())
    with pytest.raises(StateRefused, match=r"this process does not know: name it in grouper\.estimators"):
        driver.pipe(mark)
    with pytest.raises(ConfigurationError, match=r"must be named in grouper\.estimators"):
        check_names(config)
    assert "my_objectives" not in sys.modules


def test_a_state_under_an_unknown_estimator_is_refused_before_a_record_is_read() -> None:
    first = task_state.initial_record(0, 1, "test", GroupingConfig(estimator=ESTIMATOR))
    with pytest.raises(ConfigurationError, match=r"must be named in grouper\.estimators"):
        Fold(task_state.restored_state([first]))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1.0], "returned 1 advantages for 2"),
        ([1.0, float("nan")], "returned nan, not a finite float32 number"),
        ([1.0, 1e39], "returned 1e\\+39, not a finite float32 number"),
    ],
)
def test_an_estimator_that_returns_no_advantages_stops_the_task_before_a_rollout_is_lost(
    values: list[float], words: str
) -> None:
    for broken in (
        Estimator(lambda _outcomes: values),
        Estimator(lambda outcomes: list(outcomes.rewards), lambda _advantages, _weights: values),
    ):
        driver = GroupingTestDriver(
            GroupingConfig(estimator="my:broken", batch_rollouts=2), estimators={"my:broken": broken}
        )
        driver.pipe(example_rollout("a", 1.0))
        with pytest.raises(StateRefused, match=words):
            driver.pipe(example_rollout("b", 0.0))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("robust", "an estimator is named package.module:function"),
        ("my_objectives:absent", "has no attribute 'absent'"),
        ("my_objectives:Sequence", "neither an Estimator nor a function"),
        ("no_such_module:f", "No module named 'no_such_module'"),
    ],
)
def test_an_object_that_is_no_estimator_is_refused_by_name(folder: Path, name: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        load_plug_ins(GrouperConfig(estimators=(name,)))


CODE = blocks(section(page("grouping"), "Batch makers"), "python")
MINE = "my_makers:HardestFirst"


@pytest.fixture
def my_makers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The module of the page, importable, and not yet imported."""
    module = tmp_path / "my_makers.py"
    module.write_text("\n".join(CODE))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_makers", raising=False)
    return module


def test_the_page_s_maker_passes_the_page_s_test(my_makers: Path) -> None:
    names: dict[str, object] = {}
    exec(compile(my_makers.read_text(), str(my_makers), "exec"), names)
    tests = [value for name, value in names.items() if name.startswith("test_")]
    assert len(tests) == 1
    for test in tests:
        test()  # type: ignore[operator]


def test_a_maker_of_the_user_s_is_reached_by_configuration(my_makers: Path) -> None:
    makers = load_makers([MINE])
    assert set(makers) == {*MAKERS, MINE}
    config = GroupingConfig(maker=MINE, batch_rollouts=4)
    check_names(config, PlugIns(makers=makers))
    d = GroupingTestDriver(config, makers=makers)
    for example_id in "01":
        pair(d, example_id)
    assert uids(d) == [("0a", "0b", "1a", "1b")]
    assert d.batches[0].metadata == '{"batch_size": 4, "maker": "hardest_first"}'


def test_the_log_cannot_have_a_module_imported(my_makers: Path) -> None:
    d = GroupingTestDriver()
    config = GroupingConfig(generation=1, maker=MINE)
    mark = Mark(kind="configuration", generation=1, configuration=config.to_json())
    with pytest.raises(StateRefused, match=r"this process does not know: name it in grouper\.makers"):
        d.pipe(mark)
    first = task_state.initial_record(0, 1, "test", config)
    with pytest.raises(ConfigurationError, match=r"must be named in grouper\.makers"):
        Fold(task_state.restored_state([first]))
    assert "my_makers" not in sys.modules


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("HardestFirst", "is named package.module:Class"),
        ("my_makers:", "is named package.module:Class"),
        ("my_makers:Hardest.First", "is named package.module:Class"),
        ("my_makers:Easiest", "has no attribute 'Easiest'"),
        ("no_such_module:Maker", "No module named 'no_such_module'.*path/to/file.py:Name"),
        ("my_makers:fmean", "not a subclass of BatchMaker"),
    ],
)
def test_an_object_that_is_no_maker_is_refused_by_name(my_makers: Path, name: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        load_makers([name])
