"""Places of the repository."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON_PATH = os.pathsep.join([str(ROOT), str(ROOT / "src")])
"""PYTHONPATH of processes that import tests, and rollstream as it is in this checkout."""
