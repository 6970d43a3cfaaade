"""Builds images: finds their inputs, writes an archive, and loads it into a Docker engine."""

import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from rollstream.infra.image import application_contents as contents
from rollstream.infra.image.archive import ImageSettings, write_image
from rollstream.infra.image.entries import ImageEntry
from rollstream.infra.image.kafka_contents import find_inputs, kafka_entries
from rollstream.infra.jars import KAFKA_VERSION
from rollstream.topics.errors import BrokerUnavailable
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)

TAG = f"rollstream/kafka:{KAFKA_VERSION}"
APPLICATION_TAG = "rollstream:local"
PYTHON_TAG = "rollstream/python:local"
EXTRAS = ("learner", "hf", "chat", "archive", "sql", "signatures")
"""Extras of rollstream in its image by default."""
_LOAD_TIMEOUT_S = 1800.0
"""Time limit for `docker load`, which takes minutes for the image of every role on a busy machine."""
_KAFKA = ImageSettings(
    command=("/etc/kafka/docker/run",),
    variables={"PATH": "/opt/java/bin:/bin", "LANG": "C.UTF-8"},
    ports=(9092,),
)


def build(tag: str = TAG, output: Path | None = None) -> str:
    """Build the Kafka image; load it into the Docker engine as `tag`, or write it to `output`. Return its id.

    Raises BrokerUnavailable, naming each missing input: a JDK with jlink, Kafka's jars, busybox, a Docker engine.
    """
    inputs = find_inputs(os.environ)
    words = {"java": str(inputs.java.home), "kafka_version": inputs.jars.version}
    return _build(_KAFKA, lambda scratch: kafka_entries(inputs, scratch), tag, output, words)


def build_application(tag: str = APPLICATION_TAG, output: Path | None = None, extras: Sequence[str] = EXTRAS) -> str:
    """Build the image of every role, with these extras; load it as `tag`, or write it to `output`. Return its id.

    Raises ConfigurationError without Linux or if a distribution that the image needs is not installed, and
    BrokerUnavailable without a Docker engine, unless `output` is given.
    """
    inputs = contents.find_application_inputs(extras, os.environ)
    settings = ImageSettings(
        entrypoint=(f"{contents.VENV}/bin/rollstream",),
        command=("--help",),
        variables={
            **_python_variables(),
            "PATH": f"{contents.VENV}/bin:/bin",
            "HOME": contents.HOME,
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
        },
        folder=contents.HOME,
        volumes=(contents.HOME,),
        labels={
            "org.opencontainers.image.title": "rollstream",
            "org.opencontainers.image.version": version("rollstream"),
            "org.opencontainers.image.licenses": "Apache-2.0",
        },
    )
    words = {"extras": ",".join(extras), "distributions": str(len(inputs.distributions))}
    return _build(settings, lambda scratch: contents.application_entries(inputs, scratch), tag, output, words)


def build_python(tag: str = PYTHON_TAG, output: Path | None = None) -> str:
    """Build a base for the Dockerfile, to use without a registry; load it, or write it to `output`. Return its id."""
    inputs = contents.find_application_inputs((), os.environ)
    settings = ImageSettings(
        command=("python3",),
        # By default pip uses its own certificates, which do not include a company's.
        variables={**_python_variables(), "PIP_CERT": contents.CERTIFICATES},
        user="0:0",
    )
    return _build(settings, lambda scratch: contents.python_entries(inputs, scratch), tag, output, {})


def _python_variables() -> dict[str, str]:
    return {
        "PATH": f"{contents.PYTHON}/bin:/bin",
        "LD_LIBRARY_PATH": f"{contents.PYTHON}/lib",
        "LANG": "C.UTF-8",
        "SSL_CERT_FILE": contents.CERTIFICATES,
    }


def _build(
    settings: ImageSettings,
    entries: Callable[[Path], Sequence[ImageEntry]],
    tag: str,
    output: Path | None,
    words: Mapping[str, str],
) -> str:
    """Build an image of the entries that `entries` returns for a scratch folder.

    The image is written to `output`, or loaded into Docker. `words` describes the inputs; it is logged with the event
    `image_built`.
    """
    began = time.monotonic()
    docker = shutil.which("docker")
    if output is None and docker is None:
        raise BrokerUnavailable("docker is not on PATH: install it, or write the image to a file with --output")
    with tempfile.TemporaryDirectory(prefix="rollstream-image-") as folder:
        scratch = Path(folder)
        archive = output or scratch / "image.tar"
        image_id = write_image(archive, entries(scratch), settings, tag, scratch)
        size_bytes = archive.stat().st_size
        if output is None and docker is not None:
            _load(docker, archive)
    seconds = round(time.monotonic() - began, 1)
    event(logger, "image_built", tag=tag, id=image_id, size_mib=size_bytes // 2**20, seconds=seconds, inputs=words)
    return image_id


def _load(docker: str, archive: Path) -> None:
    command = [docker, "load", "--quiet", "--input", str(archive)]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_LOAD_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise BrokerUnavailable(
            f"the Docker engine did not load the image within {_LOAD_TIMEOUT_S:g} s: write it to a file with --output, "
            "and load the file"
        ) from error
    if answer.returncode != 0:
        lines = answer.stderr.strip().splitlines() or [f"exit {answer.returncode}"]
        raise BrokerUnavailable(f"the Docker engine rejected the image: {lines[-1]}")
