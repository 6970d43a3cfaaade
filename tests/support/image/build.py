"""Builds images from files of this machine, for tests where no registry is reachable, and loads them into Docker.

An image is a file as `docker save` writes it, which containerd can import, too.
"""

import hashlib
import io
import json
import os
import platform
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rollstream.infra.broker.java_runtime import KAFKA_VERSION
from rollstream.topics.errors import BrokerUnavailable
from tests.support.image import application_contents as contents
from tests.support.image.entries import USER_ID, ImageEntry, write_layer
from tests.support.image.kafka_contents import find_inputs, kafka_entries

TAG = f"rollstream/kafka:{KAFKA_VERSION}"
"""Image of a broker, which keeps the contract of the official apache/kafka."""
APPLICATION_TAG = "rollstream:local"
EXTRAS = ("learner", "hf", "chat", "archive", "sql", "signatures")
"""Extras that the Dockerfile installs by default."""
_LOAD_TIMEOUT_S = 1800.0
"""Time limit for `docker load`, which takes minutes for the image of every role on a busy machine."""


def build_kafka() -> None:
    """Build the image of a broker. Raises BrokerUnavailable, naming what is missing: a JDK, Kafka's jars, busybox."""
    with tempfile.TemporaryDirectory(prefix="rollstream-image-") as scratch:
        _load(save_kafka(Path(scratch) / "kafka.tar"))


def save_kafka(archive: Path) -> Path:
    """Write the image of a broker; see build_kafka."""
    inputs = find_inputs(os.environ)
    variables = {"PATH": "/opt/java/bin:/bin", "LANG": "C.UTF-8"}
    config = {"Cmd": ["/etc/kafka/docker/run"], "ExposedPorts": {"9092/tcp": {}}}
    with tempfile.TemporaryDirectory(prefix="rollstream-image-") as scratch:
        return save_image(archive, TAG, kafka_entries(inputs, Path(scratch)), config, variables)


def build_application(tag: str = APPLICATION_TAG, extras: Sequence[str] = EXTRAS) -> None:
    """Build the image of every role, with these extras."""
    with tempfile.TemporaryDirectory(prefix="rollstream-image-") as scratch:
        _load(save_application(Path(scratch) / "application.tar", tag, extras))


def save_application(archive: Path, tag: str = APPLICATION_TAG, extras: Sequence[str] = EXTRAS) -> Path:
    """Write the image of every role, with these extras."""
    variables = {
        **_python_variables(),
        "PATH": f"{contents.VENV}/bin:/bin",
        "HOME": contents.HOME,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    config = {
        "Entrypoint": [f"{contents.VENV}/bin/rollstream"],
        "Cmd": ["--help"],
        "WorkingDir": contents.HOME,
        "Volumes": {contents.HOME: {}},
    }
    entries = contents.application_entries(contents.find_application_inputs(extras))
    return save_image(archive, tag, entries, config, variables)


def build_python(tag: str) -> None:
    """Build a base for the Dockerfile."""
    # By default pip uses its own certificates, which do not include a company's.
    variables = {**_python_variables(), "PIP_CERT": contents.CERTIFICATES}
    entries = contents.python_entries(contents.find_application_inputs(()))
    with tempfile.TemporaryDirectory(prefix="rollstream-image-") as scratch:
        config = {"Cmd": ["python3"], "User": "0:0"}
        _load(save_image(Path(scratch) / "python.tar", tag, entries, config, variables))


def _python_variables() -> dict[str, str]:
    return {
        "PATH": f"{contents.PYTHON}/bin:/bin",
        "LD_LIBRARY_PATH": f"{contents.PYTHON}/lib",
        "LANG": "C.UTF-8",
        "SSL_CERT_FILE": contents.CERTIFICATES,
    }


def save_image(
    archive: Path,
    tag: str,
    entries: Sequence[ImageEntry],
    config: Mapping[str, Any],
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """Write an image of one layer with the entries, and return its file. `config` has the keys of an image's
    configuration."""
    layer = archive.with_suffix(".layer")
    with layer.open("w+b") as stream:
        write_layer(stream, entries)
        stream.seek(0)
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    settings = {
        "User": f"{USER_ID}:{USER_ID}",
        "Env": [f"{name}={value}" for name, value in variables.items()],
        **config,
    }
    image = {
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()],
        "os": "linux",
        "config": settings,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    texts = {
        "config.json": image,
        "manifest.json": [{"Config": "config.json", "RepoTags": [tag], "Layers": ["layer.tar"]}],
    }
    with tarfile.open(archive, "w") as whole:
        for name, document in texts.items():
            text = json.dumps(document).encode()
            info = tarfile.TarInfo(name)
            info.size = len(text)
            whole.addfile(info, io.BytesIO(text))
        whole.add(layer, "layer.tar")
    layer.unlink()
    return archive


def _load(archive: Path) -> None:
    command = ["docker", "load", "--quiet", "--input", str(archive)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=_LOAD_TIMEOUT_S)
    if answer.returncode != 0:
        raise BrokerUnavailable(f"the Docker engine rejected {archive.name}: {answer.stderr.strip()}")
