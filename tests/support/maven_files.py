"""Files of Maven repositories that tests need: fetched once, compared with a digest, kept beside the jars of Kafka."""

import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rollstream.infra.broker.java_runtime import REPOSITORY_VARIABLE, cache_dir, sha256

_FETCH_S = 900.0


def maven_file(coordinates: str, digest: str, environment: Mapping[str, str] = os.environ) -> Path:
    """A file by group:artifact:version:packaging[:classifier] and SHA-256; by Maven, or by jgo without it."""
    _group, artifact, version, packaging, *classifier = coordinates.split(":")
    name = "-".join((artifact, version, *classifier)) + f".{packaging}"
    cached = cache_dir(environment).with_name("test-files") / name
    if not cached.exists():
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".filling-", dir=cached.parent) as folder:
            fetched = Path(folder) / name
            _fetch(coordinates, fetched, environment)
            assert sha256(fetched) == digest, f"{coordinates} is not the file it was"
            fetched.replace(cached)
    return cached


def _fetch(coordinates: str, fetched: Path, environment: Mapping[str, str]) -> None:
    maven = shutil.which("mvn")
    if maven is not None:
        copy = ["dependency:copy", f"-Dartifact={coordinates}", f"-DoutputDirectory={fetched.parent}"]
        subprocess.run([maven, "-q", "-B", *copy], check=True, timeout=_FETCH_S, stdin=subprocess.DEVNULL)
        return
    assert importlib.util.find_spec("jgo") is not None
    from jgo.maven import MavenContext

    repository = environment.get(REPOSITORY_VARIABLE)
    remote = {"given": repository.rstrip("/")} if repository else None
    context = MavenContext(repo_cache=fetched.parent / "repository", remote_repos=remote, timeout=60)
    group, artifact, version, packaging, *classifier = coordinates.split(":")
    component = context.project(group, artifact).at_version(version)
    component.artifact(classifier=classifier[0] if classifier else "", packaging=packaging).resolve().rename(fetched)
