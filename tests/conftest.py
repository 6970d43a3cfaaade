"""Fixtures of every test: a real Kafka broker, a name of its own for a run, marks by location.

Without a broker the tests that need one fail; none of them is skipped.
"""

import gc
import logging
import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.cpu_budgets import CpuSeconds

# All tests run on the CPU, for equal bits everywhere, and so that JAX does not look for a TPU where libtpu is.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests and the processes that they start compile the same small programs; what one compiled, the others load.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(sys.prefix) / "jax-cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# A broker that maps its classes from an archive starts in half the CPU time. The first broker of tests writes the
# archive (tests/support/shared_broker.py); with another Java or other jars, Java loads the classes as usual.
CLASS_ARCHIVE = Path(sys.prefix) / "kafka-classes.jsa"
if CLASS_ARCHIVE.exists():
    os.environ.setdefault("JDK_JAVA_OPTIONS", f"-XX:SharedArchiveFile={CLASS_ARCHIVE} -Xshare:auto -Xlog:cds*=off")

ROOT = Path(__file__).parent
MARKED_BY_LOCATION = ("unit", "model", "broker", "containers", "faults", "museum", "browser", "bench")

FORKING = ("verifier_pool", "forking", "array_copies", "atomic_files")
"""Files whose tests fork: they begin before any test loads JAX, whose threads may deadlock a forked child."""
LONGEST = (
    *("museum", "faults", "inference_server", "simulation", "train_step", "ledger_losses", "doctor"),
    *("bad_records", "testing", "docs", "foreign_trainer", "hanging", "page", "prune", "golden_logs"),
    *("slots", "mesh", "lineage_index", "decoder", "gateway_chat", "exclude", "abandoned_episodes"),
    *("control_run", "stranded_clients", "attention", "hostile_topics", "archive", "refused_writes", "rescore"),
    *("memory_bounds", "verifier_pool", "live_ledger", "cli", "distribution", "signed_marks"),
    *("train_steps", "adapters", "weights_shards", "hostile_input", "access_rules", "chart", "demo"),
    # Whose tests are mostly long ones.
    *("afternoon", "task_demos", "network", "compose_faults", "killed_commands", "compose_run", "learner_team"),
    *("agent_example", "steered_run", "learner_team_weights", "flooded_topics", "schema_registry", "fork"),
)
"""Files whose tests begin first: files run beside each other, and would else wait for the longest at the end."""

# CI gets the same examples every time, and a developer's desk new ones; the printed blob repeats a failure. The long
# form draws more of them.
EXAMPLES = int(os.environ.get("HYPOTHESIS_EXAMPLES", "60"))
hypothesis.settings.register_profile("desk", deadline=None, print_blob=True, max_examples=EXAMPLES)
hypothesis.settings.register_profile("ci", hypothesis.settings.get_profile("desk"), derandomize=True)
# For an evening: HYPOTHESIS_PROFILE=long pytest --timeout=0 tests/unit/consumers/grouping/core/test_fold_properties.py
hypothesis.settings.register_profile("long", deadline=None, print_blob=True, max_examples=5000)
HYPOTHESIS_PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "desk")
hypothesis.settings.load_profile(HYPOTHESIS_PROFILE)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kafka",
        choices=("java", "container"),
        help="what the tests' broker runs in (default: KAFKA_BOOTSTRAP_SERVERS if set, else java)",
    )
    parser.addoption(
        "--kafka-version", help="version of the brokers that tests start, with jars from Maven, e.g. 4.0.2"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CpuSeconds(ROOT))
    if version := config.getoption("--kafka-version"):
        from tests.support.kafka_versions import kafka_home

        os.environ["KAFKA_HOME"] = str(kafka_home(version))


def pytest_report_header(config: pytest.Config) -> str:
    seed = config.getoption("--hypothesis-seed", default=None)
    provider = config.getoption("--kafka")
    given = None if provider else os.environ.get("KAFKA_BOOTSTRAP_SERVERS")
    broker = given or f"started by the tests ({provider or 'java'})"
    return f"hypothesis profile: {HYPOTHESIS_PROFILE}, seed: {seed or 'drawn'}; Kafka: {broker}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(ROOT).parts[0] if item.path.is_relative_to(ROOT) else ""
        if folder in MARKED_BY_LOCATION:
            item.add_marker(folder)
    places = {f"test_{name}": place for place, name in enumerate((*FORKING, *LONGEST))}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_collection_finish() -> None:
    """Spare the garbage collector the modules and tests, which stay: each full collection took half a second."""
    gc.freeze()


def pytest_runtest_setup() -> None:
    """Reset the level of our loggers, which a command that ran in this process sets for later tests as well."""
    logging.getLogger("rollstream").setLevel(logging.NOTSET)


_failed: set[str] = set()


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _failed.add(report.nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _failed.add(report.nodeid)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the output with the names of what failed; make repeats them after its own output."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if not _failed or terminal is None or hasattr(config, "workerinput"):
        return
    names = ", ".join(sorted(_failed))
    terminal.write_line(f"FAILED {names}")
    if os.environ.get("FAILED_TESTS"):
        with Path(os.environ["FAILED_TESTS"]).open("a") as file:
            file.write(f"{names}\n")


@pytest.fixture(scope="session")
def broker(real_broker: str) -> str:
    """Bootstrap servers of a Kafka, real but for the tests in tests/model."""
    return real_broker


@pytest.fixture(scope="session")
def real_broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Bootstrap servers of a real Kafka, one for the whole session: what --kafka says, else KAFKA_BOOTSTRAP_SERVERS,
    else a local one."""
    provider = request.config.getoption("--kafka")
    given = os.environ.get("KAFKA_BOOTSTRAP_SERVERS")
    if given and not provider:
        yield given
        return
    if provider == "container":
        image = request.getfixturevalue("kafka_image")
        from rollstream.infra.testing import KafkaContainer

        with KafkaContainer(image) as container:
            yield container.bootstrap_servers
        return
    from rollstream.infra.config import BrokerConfig
    from tests.support.shared_broker import shared_broker

    # One broker has the topics of all tests at once, and some send it records that unpack to many times their size.
    own = tmp_path_factory.getbasetemp()
    directory = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "broker"
    config = BrokerConfig(data_dir=directory, provider=provider or "auto", heap_max_mib=1024)
    with shared_broker(config) as local:
        yield local.bootstrap_servers


@pytest.fixture(scope="session")
def kafka_image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An image of Kafka in a Docker engine, both here for the session."""
    from tests.containers import engine

    # The cleaner's image comes from a registry, and what is started here is stopped here.
    os.environ.setdefault("TESTCONTAINERS_RYUK_DISABLED", "true")
    with engine.docker_engine(tmp_path_factory.mktemp("docker")):
        yield engine.kafka_image()


@pytest.fixture
def run_name() -> str:
    """A run of its own for each test, so that tests share a broker without seeing each other's topics."""
    return f"t-{uuid.uuid4().hex[:8]}"
