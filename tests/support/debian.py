"""Programs that tests need, installed by apt where the tests run as root on Debian."""

import os
import shutil
import subprocess


def install_program(program: str, package: str) -> str:
    """Install the package of a missing program if apt and root are there; return why it is still missing, if so."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "--quiet", "--yes", "--no-install-recommends", package]
    problem = f"{program} is not installed"
    for command in (install, ["apt-get", "update", "--quiet"], install):
        if shutil.which(program):
            return ""
        if shutil.which("apt-get") and os.geteuid() == 0:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
            problem = (answer.stderr.strip().splitlines() or [f"exit {answer.returncode}"])[-1]
    return "" if shutil.which(program) else problem
