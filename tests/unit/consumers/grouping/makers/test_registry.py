"""Makers that a process knows and imports, and names that it never imports; runs the code of docs/grouping.md."""

import sys
from pathlib import Path

import pytest

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core import task_state
from rollstream.consumers.grouping.core.configuration_marks import check_names
from rollstream.consumers.grouping.core.fold import Fold
from rollstream.consumers.grouping.core.plug_ins import PlugIns
from rollstream.consumers.grouping.makers.registry import MAKERS, load_makers
from rollstream.consumers.grouping.testing import GroupingTestDriver
from rollstream.topics.errors import ConfigurationError, StateRefused
from rollstream.topics.records import Mark
from tests.support.pages import blocks, page, section
from tests.support.pairs import pair, uids

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
