"""Lists of all settings, metrics and commands: as the command line prints them, and as the build of the docs writes."""

import re
from pathlib import Path

import pytest

import rollstream
from docs.build import commands, write_reference
from rollstream.pipeline.command_line.cli import main
from rollstream.pipeline.command_line.reference import metrics_text, sections, settings_text
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.settings import known_keys
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.metrics.catalogue import CATALOGUE_OF_METRICS, of_role


def test_the_built_pages_have_every_command_setting_metric_and_public_name(tmp_path: Path) -> None:
    write_reference(tmp_path / "reference")

    def listed(page: str, pattern: str) -> list[str]:
        return re.findall(pattern, (tmp_path / "reference" / page).read_text(encoding="utf-8"), re.MULTILINE)

    assert listed("commands.md", r"^## `rollstream (.+)`$") == list(commands())
    # A node of a cluster is an object, which no file can give.
    keys = {*(key.removesuffix(".*") for key in known_keys(RunConfig)), "environments"} - {"broker.node"}
    assert sorted(listed("settings.md", r"^\| `(\S+)` \|")) == sorted(keys)
    assert sorted(listed("metrics.md", r"^\| `(\S+)` \|")) == sorted(spec.name for spec in CATALOGUE_OF_METRICS)
    public = [name for name in rollstream.__all__ if not name.startswith("__")]
    assert sorted(listed("names.md", r"^\| `(\S+)` \|")) == sorted(public)


def test_settings_below_a_key_are_printed_with_default_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help-settings", "topics"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith("[topics]\nThe shape of a run's topics.\n\n  topics.partitions = 4\n      Partitions P")
    assert re.findall(r"^  (\S+) = ", printed, re.MULTILINE) == [
        key for key in known_keys(RunConfig) if key.startswith("topics.")
    ]
    assert settings_text("topics.partitions").count(" = ") == 1


def test_all_settings_are_printed_without_a_key() -> None:
    keys = re.findall(r"^  (\S+) = ", settings_text(), re.MULTILINE)
    assert keys == [setting.key for section in sections() for setting in section.settings]


def test_metrics_of_a_role_are_printed_with_kind_unit_and_labels(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help-metrics", "group"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "rollstream_grouping_lag{partition}  gauge in records\n    Records of `rollouts`" in printed
    names = re.findall(r"^(rollstream_\w+)", printed, re.MULTILINE)
    assert names == [spec.name for spec in of_role("group")]
    assert len(re.findall(r"^rollstream_\w+", metrics_text(), re.MULTILINE)) == len(CATALOGUE_OF_METRICS)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (lambda: settings_text("topics.partition"), "no setting 'topics.partition'; did you mean topics.partitions?"),
        (lambda: settings_text("quartz"), "choose from broker, collect"),
        (lambda: metrics_text("grup"), "no role that serves metrics 'grup'; did you mean group?"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_one(text: object, says: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        text()  # type: ignore[operator]
