"""The module of docs/objectives.md, as a user has it: in a folder outside the packages."""

import re
from pathlib import Path

from tests.support.paths import ROOT

PAGE = ROOT / "docs/objectives.md"
CODE = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
SETTINGS = re.findall(r"^```toml\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
ESTIMATOR = "my_objectives:robust"
"""The estimator, as a module that is installed; the settings of the page name its file."""


def write_objectives(folder: Path) -> Path:
    """Write the code of the page to my_objectives.py in a folder."""
    module = folder / "my_objectives.py"
    module.write_text("\n".join(CODE), encoding="utf-8")
    return module
