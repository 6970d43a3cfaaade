"""Charts under the real helm: it renders what other tests judge, and refuses values by their schema."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.charts import CONTROL, DEVELOPMENT, MUCH, PRODUCTION, Release, write_chart
from tests.support.helm import helm
from tests.support.helm_templates import LOADER

CASES: list[tuple[str, tuple[str, ...]]] = [
    (MUCH, ()),
    (MUCH, (DEVELOPMENT,)),
    (MUCH, (PRODUCTION,)),
    (CONTROL, (DEVELOPMENT, PRODUCTION)),
]

CLUSTER = ("--kube-version", "1.31.0")
"""A helm that Go has compiled takes another release for that of the cluster."""


def by_helm(chart: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(helm()), *arguments], cwd=chart, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.long
@pytest.mark.parametrize(("text", "files"), CASES, ids=["defaults", "development", "production", "control"])
def test_helm_renders_what_the_tests_render(text: str, files: tuple[str, ...], tmp_path: Path) -> None:
    chart = write_chart(tmp_path, text)
    named = [word for name in files for word in ("--values", name)]
    lint = by_helm(chart, "lint", "--strict", ".", *named)
    assert lint.returncode == 0, lint.stdout + lint.stderr
    rendered = by_helm(chart, "template", "release", ".", *CLUSTER, *named)
    assert rendered.returncode == 0, rendered.stderr
    objects = [document for document in yaml.load_all(rendered.stdout, LOADER) if document]
    assert _sorted(objects) == _sorted(Release(chart, *files).objects)


@pytest.mark.long
@pytest.mark.parametrize("value", ["roles.group.replicas=5", "brokers.enabled=false", "roles.nobody.image=x"])
def test_helm_refuses_values_out_of_their_bounds(value: str, tmp_path: Path) -> None:
    refused = by_helm(write_chart(tmp_path), "template", "release", ".", *CLUSTER, "--set", value)
    assert refused.returncode != 0
    assert "values don't meet the specifications of the schema" in refused.stderr


def _sorted(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(objects, key=lambda each: json.dumps([each["kind"], each["metadata"]["name"]]))
