"""The module of docs/losses.md, as a user has it: in a folder outside the packages."""

from pathlib import Path

from tests.support.pages import blocks, page, section

CODE = blocks(section(page("losses"), "Your own objectives"), "python")
SETTINGS = blocks(section(page("losses"), "Your own objectives"), "toml")
ESTIMATOR = "my_objectives:robust"
"""The estimator, as a module that is installed; the settings of the page name its file."""


def write_objectives(folder: Path) -> Path:
    """Write the code of the page to my_objectives.py in a folder."""
    module = folder / "my_objectives.py"
    module.write_text("\n".join(CODE), encoding="utf-8")
    return module
