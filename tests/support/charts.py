"""Charts for tests: written as a user writes them, and rendered by the real helm into the objects of a cluster."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from rollstream.pipeline.command_line.cli import build_parser
from rollstream.pipeline.config import RunConfig, load
from tests.support import run_files
from tests.support.helm import helm

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The one in C, where there is one: charts have thousands of lines."""

MUCH = run_files.MUCH + '\n[serving]\nurls = ["http://engine:8001"]\n'
CONTROL = 'run = "Cells_2"\n[collect]\nprocesses = 2\nplayer = "cell:play"\n[fill]\ndirectory = "windows"\n'
DEVELOPMENT, PRODUCTION = "values-development.yaml", "values-production.yaml"
THEIR_BROKERS: Mapping[str, Any] = {"brokers": {"enabled": False, "bootstrapServers": "kafka:9094"}}
Object = dict[str, Any]
TEMPLATE = ("template", "release", ".", "--kube-version", "1.31.0")
"""A helm that Go has compiled takes another release than the chart needs for that of the cluster."""


def write_chart(folder: Path, text: str = MUCH, *flags: str) -> Path:
    """The directory of the chart that the command writes."""
    (folder / "run.toml").write_text(text)
    chart = folder / "chart"
    args = build_parser().parse_args(["deploy", "chart", str(folder / "run.toml"), "-o", str(chart), *flags])
    assert args.run(args) == 0
    return chart


def by_helm(
    chart: Path, words: tuple[str, ...], files: tuple[str, ...] = (), over: Mapping[str, Any] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command of helm on a chart with further files of values in its directory, and values `over` them."""
    named = [word for name in (*files, "-") for word in ("--values", name)]
    command = [str(helm()), *words, *named]
    values = json.dumps(over or {})
    return subprocess.run(command, cwd=chart, input=values, capture_output=True, text=True, timeout=600, check=False)


class Release:
    """The objects of a chart under some of its values."""

    def __init__(self, chart: Path, *files: str, over: Mapping[str, Any] | None = None) -> None:
        """Render a chart with further files of values in its directory, and with the values `over` them."""
        rendered = by_helm(chart, TEMPLATE, files, over)
        assert rendered.returncode == 0, rendered.stderr
        self.chart, self.objects = chart, [each for each in yaml.load_all(rendered.stdout, LOADER) if each]

    @property
    def name(self) -> str:
        """The beginning of the names of all objects."""
        [settings] = [name for name in self.of("ConfigMap") if name.endswith("-settings")]
        return settings.removesuffix("-settings")

    def of(self, kind: str) -> dict[str, Object]:
        """Objects of a kind, by name."""
        objects = [each for each in self.objects if each["kind"] == kind]
        named = {each["metadata"]["name"]: each for each in objects}
        assert len(named) == len(objects), f"two objects {kind} have one name"
        return named

    def pods(self) -> dict[str, Object]:
        """Templates of the pods of all workloads, by what the pods are."""
        templates: dict[str, Object] = {}
        for each in self.objects:
            spec = each.get("spec", {})
            if each["kind"] in ("StatefulSet", "Job"):
                template = spec["template"]
            elif each["kind"] == "CronJob":
                template = spec["jobTemplate"]["spec"]["template"]
            elif each["kind"] == "JobSet":
                [job] = spec["replicatedJobs"]
                template = job["template"]["spec"]["template"]
            else:
                continue
            templates[template["metadata"]["labels"]["app.kubernetes.io/component"]] = template
        return templates

    def settings(self, role: str, secrets: Mapping[str, Mapping[str, str]] = MappingProxyType({})) -> RunConfig:
        """The settings of a pod of a role: those of its file, overridden by its variables. `secrets` are the variables
        in the Secrets that the values name."""
        pod = self.pods()[role]["spec"]
        [container] = pod["containers"]
        maps = self.of("ConfigMap")
        variables: dict[str, str] = {}
        for source in container["envFrom"]:
            [(kind, reference)] = source.items()
            named = reference["name"]
            variables |= maps[named]["data"] if kind == "configMapRef" else secrets[named]
        for variable in container.get("env", ()):
            variables[variable["name"]] = variable.get("value", "a secret")
        assert all(isinstance(value, str) for value in variables.values())
        file = self.chart.parent / f"of-{role}.toml"
        mounted = [volume["configMap"]["name"] for volume in pod["volumes"] if volume["name"] == "config"]
        file.write_text("".join(maps[name]["data"]["run.toml"] for name in mounted))
        return load(file, environment=variables)
