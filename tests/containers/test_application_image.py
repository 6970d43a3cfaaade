"""The image of every role, as users start it: no root, a read-only root, one image for the whole of a run."""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from testcontainers.core.container import DockerContainer
from testcontainers.core.network import Network

from rollstream.infra.testing import KafkaContainer
from rollstream.pipeline.audit.ledger import ledger
from rollstream.pipeline.audit.verification import verify
from rollstream.topics.config import KafkaConfig
from rollstream.topics.records import Rollout
from tests.support.image.build import build_application, build_python
from tests.support.paths import ROOT
from tests.support.runs import RealRun
from tests.support.waiting import eventually

CORE, WHOLE = "rollstream/test:core", "rollstream/test:learner"
RUN = """
run = "contained"
task = "dsort3"
[kafka]
bootstrap_servers = "{kafka}"
[topics]
partitions = 2
[inference]
host = "0.0.0.0"
port = 8000
[worker]
inference_urls = ["http://infer:8000/v1"]
group_size = 8
[grouping]
batch_rollouts = 16
[learner]
rollouts_per_step = 32
microbatch_rows = 16
max_steps = 4
threads = 1
"""


def docker(*words: str) -> str:
    answer = subprocess.run(["docker", *words], capture_output=True, text=True, timeout=1200)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


@pytest.fixture(scope="module")
def core_image(kafka_image: str) -> str:
    """rollstream without extras, in the engine that the fixture of Kafka's image has started."""
    assert kafka_image
    build_application(CORE, extras=())
    return CORE


@pytest.fixture(scope="module")
def whole_image(kafka_image: str) -> str:
    assert kafka_image
    build_application(WHOLE, extras=("learner",))
    return WHOLE


@pytest.mark.long
def test_the_command_runs_without_root_on_a_read_only_root(core_image: str) -> None:
    contained = ("run", "--rm", "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--network", "none")
    assert docker(*contained, core_image, "--version").startswith("rollstream ")
    look = (
        "import os, ssl, sqlite3, rollstream; print(os.getuid(), os.access('.', os.W_OK), os.access('/opt', os.W_OK))"
    )
    assert docker(*contained, "--entrypoint", "python", core_image, "-c", look).split() == ["1000", "True", "False"]


@pytest.mark.long
def test_the_dockerfile_builds_the_same_versions(kafka_image: str, core_image: str) -> None:
    """Its base is this machine's Python, as if no registry were reachable; the packages come from an index."""
    assert kafka_image
    build_python("rollstream/test:python")
    docker(
        *("build", "--file", str(ROOT / "Dockerfile"), "--tag", "rollstream/test:dockerfile"),
        *("--network", "host", "--build-arg", "BASE=rollstream/test:python", "--build-arg", "EXTRAS=", str(ROOT)),
    )
    contained = ("run", "--rm", "--read-only", "--tmpfs", "/tmp")
    assert docker(*contained, "rollstream/test:dockerfile", "--version") == docker(*contained, core_image, "--version")
    listing = (
        "import importlib.metadata as m; print(sorted((d.metadata['Name'], d.version) for d in m.distributions()))"
    )
    installed = {
        docker("run", "--rm", "--entrypoint", "python", image, "-c", listing)
        for image in (core_image, "rollstream/test:dockerfile")
    }
    assert len(installed) == 1


@pytest.fixture
def network(whole_image: str) -> Iterator[Network]:
    assert whole_image
    with Network() as network:
        yield network


@pytest.mark.long
def test_a_run_of_containers_trains_and_every_rollout_is_accounted_for(
    kafka_image: str, whole_image: str, network: Network, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    settings = tmp_path / "run.toml"

    def container(name: str, *words: str) -> DockerContainer:
        return (
            DockerContainer(whole_image, read_only=True, cap_drop=["ALL"])
            .with_tmpfs_mount("/tmp")
            .with_network(network)
            .with_network_aliases(name)
            .with_volume_mapping(str(settings), "/etc/rollstream/run.toml", "ro")
            .with_command([*words, "--config", "/etc/rollstream/run.toml"])
        )

    def ended(role: DockerContainer, within_s: int) -> int:
        return int(role.get_wrapped_container().wait(timeout=within_s)["StatusCode"])

    def logs(role: DockerContainer) -> str:
        return b"".join(role.get_logs()).decode(errors="replace")[-3000:]

    with (
        KafkaContainer(kafka_image, alias="kafka").with_network(network) as kafka,
        ExitStack() as running,
    ):
        settings.write_text(RUN.format(kafka=kafka.network_address))
        settings.chmod(0o644)
        with container("topics", "topics", "apply") as topics:
            assert ended(topics, 120) == 0, logs(topics)
        commands = {
            "learn": ("learn",),
            "infer": ("infer",),
            "group-0": ("group", "--ordinal", "0"),
            "group-1": ("group", "--ordinal", "1"),
        }
        roles = {name: running.enter_context(container(name, *words)) for name, words in commands.items()}
        eventually(lambda: "inference_listening" in logs(roles["infer"]), 300, "the server listens")
        roles["env-0"] = running.enter_context(container("env-0", "env"))
        assert ended(roles["learn"], 900) == 0, {name: logs(role) for name, role in roles.items()}
        for name in ("env-0", "group-0", "group-1", "infer"):
            roles[name].get_wrapped_container().stop(timeout=60)
            assert ended(roles[name], 10) == 0, logs(roles[name])
        with container("ledger", "ledger") as books:
            assert ended(books, 300) == 0, logs(books)
        run = RealRun(KafkaConfig(bootstrap_servers=kafka.bootstrap_servers), "contained", tmp_path)
        assert ledger(run.kafka, run.name).balanced
        assert verify(run.kafka, run.name).mismatches == []
        versions = {record.policy_version for record in run.read("rollouts") if isinstance(record, Rollout)}
        assert max(versions) >= 1  # the server in its container follows the learner in its own
