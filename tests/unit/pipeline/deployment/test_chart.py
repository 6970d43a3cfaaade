"""The chart that the command writes: its files, and values within the bounds of their schema. Other tests render it."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from rollstream.pipeline.deployment.access_rules import TOPICS
from rollstream.pipeline.deployment.chart import CHART, MARK, TOOLS
from rollstream.pipeline.deployment.description import ENGINE, ROLES
from rollstream.topics.errors import ConfigurationError
from tests.support.charts import CONTROL, LOADER, MUCH, write_chart
from tests.support.paths import ROOT

SCHEMA = json.loads((CHART / "values.schema.json").read_text())


def read(chart: Path, name: str = "values.yaml") -> dict[str, Any]:
    table: dict[str, Any] = yaml.load((chart / name).read_text(), LOADER)
    return table


@pytest.mark.parametrize(
    "change",
    [
        {"roles": {"env": {"replicas": -1}}},
        {"autoscaling": {"minReplicas": 0}},
        {"autoscaling": {"lagPerReplica": "many"}},
        {"brokers": {"count": 0}},
        {"roles": {"grouping": {}}},
        {"netwrokPolicies": {"enabled": False}},
        {"roles": {"infer": {"replicas": 3}}},
        {"roles": {"learn": {"enabled": False}}},
        {"roles": {"learn": {"imgae": "x"}}},
        {"roles": {"prune": {"schedule": "daily"}}},
        {"roles": {"prune": {"schedule": "17 3 * *"}}},
    ],
    ids=str,
)
def test_values_that_no_run_allows_are_refused(change: Mapping[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(change, SCHEMA)


@pytest.mark.parametrize("schedule", ["@daily", "@every 6h", "*/15 1-5,20 1 JAN mon"])
def test_every_form_of_a_schedule_that_kubernetes_accepts_is_a_value(schedule: str) -> None:
    jsonschema.validate({"roles": {"prune": {"schedule": schedule}}}, SCHEMA)


@pytest.mark.parametrize("text", [MUCH, CONTROL], ids=["tokens", "control"])
def test_values_keep_their_schema_which_knows_every_role(text: str, tmp_path: Path) -> None:
    chart = write_chart(tmp_path, text)
    for path in chart.glob("values*.yaml"):
        jsonschema.validate(read(chart, path.name), SCHEMA)
    # An engine of others has a container of its own.
    roles = {TOPICS, TOOLS, *(role.name for role in ROLES)} - {ENGINE}
    jsonschema.validate({"roles": {name: {} for name in roles}}, SCHEMA)
    values = read(chart)
    pods = values["run"]["pods"]
    assert pods.keys() <= roles
    assert {name for name, pod in pods.items() if "accessMode" in pod} <= values["storage"].keys()


def test_texts_that_helm_or_yaml_could_read_otherwise_stay_what_they_are(tmp_path: Path) -> None:
    odd = '{{ .Values.image }} "{{{" $x'
    text = f"# {odd}\n\n  # next\n"
    run = read(write_chart(tmp_path, text, f"--set=worker.model={odd}"))["run"]
    assert (run["file"], run["variables"]["ROLLSTREAM_WORKER__MODEL"]) == (text, odd)
    assert all(isinstance(variable, str) for variable in run["variables"].values())


def test_the_chart_has_the_version_of_the_package() -> None:
    about = read(CHART, "Chart.yaml")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert about["version"] == about["appVersion"] == version


@pytest.mark.parametrize(
    ("text", "flags", "says"),
    [
        ('run = "9"', [], "names must begin with a letter"),
        (f'run = "{"r" * 40}"', [], "choose a name of 30 characters at most"),
        ("", ["--set=learner.weights.url=weights"], "pods share no directory; name a URL of a store"),
        ("", ["-X", "security.protocol=SSL"], "kafka.bootstrap_servers has 127.0.0.1:9092"),
        (
            "",
            ['--set=worker.inference_urls=["http://127.0.0.1:8000/v1"]'],
            "worker.inference_urls has http://127.0.0.1",
        ),
        (
            "",
            ["--set=broker.properties.ssl.keystore.password=env:STORE"],
            "broker.properties.ssl.keystore.password refers to a secret, which brokers in containers do not get",
        ),
    ],
)
def test_what_no_pod_can_have_is_refused_with_the_remedy(
    text: str, flags: list[str], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        write_chart(tmp_path, text, *flags)
    assert says in str(refused.value)


def test_a_chart_written_again_loses_our_templates_of_before_and_nobody_elses(tmp_path: Path) -> None:
    chart = write_chart(tmp_path)
    templates = {path.name for path in chart.glob("templates/*.yaml")}
    assert templates == {path.name for path in CHART.glob("templates/*.yaml")}
    assert all((chart / "templates" / name).read_text().startswith(MARK) for name in templates)
    (chart / "templates" / "mine.yaml").write_text("# mine\n")
    (chart / "templates" / "before.yaml").write_text(f"{MARK} */ -}}}}\n")
    write_chart(tmp_path, 'run = "other"\n')
    assert {path.name for path in chart.glob("templates/*.yaml")} == {*templates, "mine.yaml"}
    assert read(chart)["run"]["name"] == "other"
