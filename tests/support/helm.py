"""The real helm: the one on PATH, else one that Go compiles once, next to the other files that tests fetch."""

import os
import shutil
import subprocess
from pathlib import Path

from rollstream.infra.broker.java_runtime import cache_dir

VERSION = "v3.19.5"
_COMPILE_S = 3600.0


def helm() -> Path:
    """Path of the program helm."""
    path_found = shutil.which("helm")
    if path_found:
        return Path(path_found)
    cached = cache_dir(os.environ).with_name("test-files") / f"helm-{VERSION}" / "helm"
    if not cached.exists():
        go = shutil.which("go")
        assert go, "charts are rendered by the real helm: install helm (https://helm.sh), or Go, which compiles it"
        # The module proxy's digests are compared with the public ones.
        filling = cached.parent.with_suffix(".filling")
        command = [go, "install", f"helm.sh/helm/v3/cmd/helm@{VERSION}"]
        subprocess.run(command, check=True, timeout=_COMPILE_S, env={**os.environ, "GOBIN": str(filling)}, cwd="/")
        cached.parent.mkdir(parents=True, exist_ok=True)
        (filling / "helm").replace(cached)
    return cached
