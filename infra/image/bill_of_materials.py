"""Bill of materials of rollstream's image: its distributions with versions and licences, as CycloneDX 1.6 in JSON."""

import json
import platform
from collections.abc import Sequence
from importlib.metadata import Distribution
from typing import Any

from packaging.utils import NormalizedName, canonicalize_name

BILL = "/opt/rollstream/bill-of-materials.cdx.json"
"""Path of the bill within the image."""
_ROOT = NormalizedName("rollstream")


def bill_of_materials(distributions: Sequence[Distribution]) -> bytes:
    """Return the bill as JSON, without a serial number or time, so that the same distributions give the same bytes."""
    components = {canonicalize_name(part.metadata["Name"]): _component(part) for part in distributions}
    python = {
        "type": "platform",
        "bom-ref": "python",
        "name": "python",
        "version": platform.python_version(),
        "purl": f"pkg:generic/python@{platform.python_version()}",
    }
    bill = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {**components[_ROOT], "type": "application"}},
        "components": [python, *(components[name] for name in sorted(components) if name != _ROOT)],
    }
    return json.dumps(bill, indent=2, sort_keys=True).encode()


def _component(installed: Distribution) -> dict[str, Any]:
    name, version = canonicalize_name(installed.metadata["Name"]), installed.version
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": f"pkg:pypi/{name}@{version}",
        "name": name,
        "version": version,
        "purl": f"pkg:pypi/{name}@{version}",
    }
    expressions = installed.metadata.get_all("License-Expression", [])
    names = [name for name in installed.metadata.get_all("License", []) if "\n" not in name and name != "UNKNOWN"]
    if expressions:
        component["licenses"] = [{"expression": expressions[0]}]
    elif names:
        component["licenses"] = [{"license": {"name": names[0]}}]
    return component
