"""Tests of code that speaks to Kafka: over a model of it in virtual time, and with `--kafka` over a real one."""

from collections.abc import Iterator

import pytest

from rollstream.consumers.weights.step_log import StepLog
from tests.simulation.installation import World, installed
from tests.simulation.roles import MODEL, modelled_roles
from tests.simulation.threads import virtual_threads
from tests.support.run_fixtures import _compile_once, compiled, kafka, real_run, run  # noqa: F401
from tests.support.runs import RealRun

_MOST_STEPS = 3_000_000
_MARKER_S, _CONNECT_S = 0.02, 0.05
"""As on a broker without faults: a client that connects after a commit sees what was committed."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only Kafka can answer, such as a broker's memory, unless there is one."""
    if not config.getoption("--kafka"):
        without = [item for item in items if item.get_closest_marker("kafka") is not None]
        config.hook.pytest_deselected(items=without)
        items[:] = [item for item in items if item not in set(without)]


@pytest.fixture(scope="module")
def broker(request: pytest.FixtureRequest) -> Iterator[str]:
    """Bootstrap servers of the model, or of the Kafka that `--kafka` names."""
    if request.config.getoption("--kafka"):
        yield request.getfixturevalue("real_broker")
        return
    world = World()
    world.begin(most_steps=_MOST_STEPS).slow_marker_s = _MARKER_S
    world.connect_s = _CONNECT_S
    with installed(world), virtual_threads(world), modelled_roles(world):
        try:
            yield MODEL
        finally:
            world.scheduler.end()


@pytest.fixture
def log(run: RealRun) -> Iterator[StepLog]:  # noqa: F811 the fixture named run
    """The log of the run's learner."""
    log = StepLog(run.kafka, run.name, "default")
    yield log
    log.close()
