"""Images of the tests with containers, each built once for those that share an engine."""

import pytest

from tests.support.image.build import build_application


@pytest.fixture(scope="session")
def local_images(kafka_image: str) -> str:
    """Build the image of the roles that a compose file names by default; return the image of the brokers."""
    build_application()
    return kafka_image
