"""What every test may ask for: a real Kafka broker, a name of its own for a run, marks by location.

Without a broker the tests that need one fail; none is ever skipped.
"""

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).parent
MARKED_BY_LOCATION = ("unit", "broker", "faults", "browser", "bench")

# On CI the same examples every time; at a developer's desk new ones, with the blob that repeats a failure.
hypothesis.settings.register_profile("desk", deadline=None, print_blob=True)
hypothesis.settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
# For an evening: HYPOTHESIS_PROFILE=long pytest --timeout=0 tests/unit/consumers/grouping/test_fold_properties.py
hypothesis.settings.register_profile("long", deadline=None, print_blob=True, max_examples=5000)
HYPOTHESIS_PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "desk")
hypothesis.settings.load_profile(HYPOTHESIS_PROFILE)


def pytest_report_header(config: pytest.Config) -> str:
    seed = config.getoption("--hypothesis-seed", default=None)
    broker = os.environ.get("KAFKA_BOOTSTRAP_SERVERS") or "started by the tests"
    return f"hypothesis profile: {HYPOTHESIS_PROFILE}, seed: {seed or 'drawn'}; Kafka: {broker}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(ROOT).parts[0] if item.path.is_relative_to(ROOT) else ""
        if folder in MARKED_BY_LOCATION:
            item.add_marker(folder)


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Bootstrap servers of a real Kafka, one for the whole session: KAFKA_BOOTSTRAP_SERVERS, else a local one."""
    given = os.environ.get("KAFKA_BOOTSTRAP_SERVERS")
    if given:
        yield given
        return
    from infra.broker import LocalBroker

    with LocalBroker.start(tmp_path_factory.mktemp("broker"), bound_to_parent=True) as local:
        yield local.bootstrap_servers


@pytest.fixture
def run_name() -> str:
    """A run of its own for each test, so that tests share a broker without seeing each other's topics."""
    return f"t-{uuid.uuid4().hex[:8]}"
