"""Schemas of custom kinds as their operators publish them, in Go modules; unknown keys are mistakes here."""

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from tests.support.charts import LOADER

MODULES: Mapping[tuple[str, str], tuple[str, str]] = {
    ("keda.sh/v1alpha1", "ScaledObject"): (
        "github.com/kedacore/keda/v2@v2.21.0",
        "config/crd/bases/keda.sh_scaledobjects.yaml",
    ),
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): (
        "sigs.k8s.io/jobset@v0.10.1",
        "config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml",
    ),
}
"""Module and file of each kind, by its version and name."""


def published_schema(version: str, kind: str) -> Mapping[str, Any]:
    """The schema of a kind, from the module cache of Go, which `go` fills and compares with the public digests."""
    go = shutil.which("go")
    assert go, "the schemas of operators come as Go modules: install Go (https://go.dev/dl)"
    module, file = MODULES[version, kind]
    fetch = [go, "mod", "download", "-json", module]
    answer = subprocess.run(fetch, check=True, capture_output=True, text=True, timeout=600, cwd="/")
    return schema_of(Path(json.loads(answer.stdout)["Dir"]) / file, version.rpartition("/")[2])


def schema_of(definition: Path, version: str) -> Mapping[str, Any]:
    """The schema of a version in the definition of a custom resource."""
    document = yaml.load(definition.read_text(), LOADER)
    [actual] = [each for each in document["spec"]["versions"] if each["name"] == version]
    schema: Mapping[str, Any] = _strict(actual["schema"]["openAPIV3Schema"])
    return schema


def check_published(document: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
    """Raise ValidationError if an object is not as the schema says."""
    jsonschema.Draft7Validator(schema).validate(document)


def _strict(schema: Any) -> Any:
    """The schema, with Kubernetes' own keywords translated to JSON Schema, and without room for unknown keys."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    strict = {key: _strict(value) for key, value in schema.items() if key not in ("description", "default", "format")}
    if isinstance(schema.get("properties"), Mapping):
        # A property may have the name of a keyword that is left out above.
        strict["properties"] = {key: _strict(value) for key, value in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields") and "additionalProperties" not in schema:
            strict["additionalProperties"] = False
    if schema.get("x-kubernetes-int-or-string"):
        strict.pop("type", None)
    return strict
