"""Builds images from files of this machine, for tests where no registry is reachable, and imports them into Docker."""

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

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
_IMPORT_TIMEOUT_S = 1800.0
"""Time limit for `docker import`, which takes minutes for the image of every role on a busy machine."""


def build_kafka() -> None:
    """Build the image of a broker. Raises BrokerUnavailable, naming what is missing: a JDK, Kafka's jars, busybox."""
    inputs = find_inputs(os.environ)
    variables = {"PATH": "/opt/java/bin:/bin", "LANG": "C.UTF-8"}
    with tempfile.TemporaryDirectory(prefix="rollstream-image-") as scratch:
        _import(kafka_entries(inputs, Path(scratch)), TAG, variables, 'CMD ["/etc/kafka/docker/run"]', "EXPOSE 9092")


def build_application(tag: str = APPLICATION_TAG, extras: Sequence[str] = EXTRAS) -> None:
    """Build the image of every role, with these extras."""
    variables = {
        **_python_variables(),
        "PATH": f"{contents.VENV}/bin:/bin",
        "HOME": contents.HOME,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    changes = (
        f'ENTRYPOINT ["{contents.VENV}/bin/rollstream"]',
        'CMD ["--help"]',
        f"WORKDIR {contents.HOME}",
        f"VOLUME {contents.HOME}",
    )
    _import(contents.application_entries(contents.find_application_inputs(extras)), tag, variables, *changes)


def build_python(tag: str) -> None:
    """Build a base for the Dockerfile."""
    # By default pip uses its own certificates, which do not include a company's.
    variables = {**_python_variables(), "PIP_CERT": contents.CERTIFICATES}
    entries = contents.python_entries(contents.find_application_inputs(()))
    _import(entries, tag, variables, 'CMD ["python3"]', user="0:0")


def _python_variables() -> dict[str, str]:
    return {
        "PATH": f"{contents.PYTHON}/bin:/bin",
        "LD_LIBRARY_PATH": f"{contents.PYTHON}/lib",
        "LANG": "C.UTF-8",
        "SSL_CERT_FILE": contents.CERTIFICATES,
    }


def _import(
    entries: Sequence[ImageEntry],
    tag: str,
    variables: Mapping[str, str],
    *changes: str,
    user: str = f"{USER_ID}:{USER_ID}",
) -> None:
    """Import the entries into the Docker engine as an image of one layer; the changes are those of a Dockerfile."""
    settings = (*(f"ENV {name}={json.dumps(value)}" for name, value in variables.items()), f"USER {user}", *changes)
    with tempfile.TemporaryDirectory(prefix="rollstream-image-") as scratch:
        archive = Path(scratch) / "layer.tar"
        with archive.open("wb") as stream:
            write_layer(stream, entries)
        words = [word for change in settings for word in ("--change", change)]
        command = ["docker", "import", *words, str(archive), tag]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S)
    if answer.returncode != 0:
        raise BrokerUnavailable(f"the Docker engine rejected the image {tag}: {answer.stderr.strip()}")
