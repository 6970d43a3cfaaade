"""Images of the tests with containers, each built once for those that share an engine."""

import subprocess
import sys

import pytest

from rollstream.infra.image.build import APPLICATION_TAG, TAG


@pytest.fixture(scope="session")
def local_images(kafka_image: str) -> str:
    """The images that a compose file names by default, built as users build them; returns that of the roles."""
    for name in ("rollstream", *(("kafka",) if kafka_image != TAG else ())):
        command = [sys.executable, "-m", "rollstream.infra.image", "build", name]
        built = subprocess.run(command, capture_output=True, text=True, timeout=1800)
        assert built.returncode == 0, built.stderr
    return APPLICATION_TAG
