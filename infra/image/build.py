"""Builds the image: finds its inputs, writes the archive, and loads it into a Docker engine."""

import logging
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from rollstream.infra.image.archive import write_image
from rollstream.infra.image.contents import find_inputs, image_entries
from rollstream.infra.jars import KAFKA_VERSION
from rollstream.topics.errors import BrokerUnavailable
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)

TAG = f"rollstream/kafka:{KAFKA_VERSION}"
_LOAD_TIMEOUT_S = 300.0


def build(tag: str = TAG, output: Path | None = None) -> str:
    """Build the image called `tag`; load it into the Docker engine, or write it to `output`. Return its id.

    Raises BrokerUnavailable, naming each missing input: a JDK with jlink, Kafka's jars, busybox, a Docker engine.
    """
    began = time.monotonic()
    docker = shutil.which("docker")
    if output is None and docker is None:
        raise BrokerUnavailable("docker is not on PATH: install it, or write the image to a file with --output")
    inputs = find_inputs(os.environ)
    with tempfile.TemporaryDirectory(prefix="rollstream-image-") as folder:
        scratch = Path(folder)
        archive = output or scratch / "image.tar"
        image_id = write_image(archive, image_entries(inputs, scratch), tag, scratch)
        size_bytes = archive.stat().st_size
        if output is None and docker is not None:
            _load(docker, archive)
    event(
        logger,
        "image_built",
        tag=tag,
        id=image_id,
        size_mib=size_bytes // 2**20,
        java=str(inputs.java.home),
        kafka_version=inputs.jars.version,
        seconds=round(time.monotonic() - began, 1),
    )
    return image_id


def _load(docker: str, archive: Path) -> None:
    answer = subprocess.run(
        [docker, "load", "--quiet", "--input", str(archive)], capture_output=True, text=True, timeout=_LOAD_TIMEOUT_S
    )
    if answer.returncode != 0:
        lines = answer.stderr.strip().splitlines() or [f"exit {answer.returncode}"]
        raise BrokerUnavailable(f"the Docker engine does not take the image: {lines[-1]}")
