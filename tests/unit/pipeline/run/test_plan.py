"""The roles of a run, from its configuration."""

import json
import re
import sys
from pathlib import Path

import pytest

from rollstream.pipeline.config import load
from rollstream.pipeline.deployment.description import role_of
from rollstream.pipeline.run import plan as plans
from rollstream.pipeline.run.plan import ServicePorts, plan
from rollstream.topics.errors import ConfigurationError


def test_a_run_has_a_gateway_where_it_has_a_port_and_it_counts_as_a_producer() -> None:
    without, with_one = load(), load(flags=["gateway.port=8100"])
    assert plans.plan(without, Path("run.toml")).of("gateway") == ()
    (spec,) = plans.plan(with_one, Path("run.toml")).of("gateway")
    assert "gateway" in spec.arguments
    assert with_one.capacity.workers == without.capacity.workers + 1


LABELED = ["environments.0.use=add", "environments.1.use=dsort3", "environments.1.rewards=labeler"]


def test_a_run_whose_rewards_come_from_a_labeler_has_labelers_which_are_ready_before_a_rollout_is_produced() -> None:
    config = load(flags=[*LABELED, "labeling.labeler=judge"])
    assert not config.is_control
    roles = plans.plan(config, Path("run.toml"))
    assert [spec.name for spec in roles.of("label")] == ["label-0"]
    assert roles.of("label")[0] in roles.consumers
    several = load(flags=[*LABELED, "labeling.labeler=judge", "labeling.processes=3"])
    assert not several.is_control
    assert [spec.name for spec in plans.plan(several, Path("run.toml")).of("label")] == [
        "label-0",
        "label-1",
        "label-2",
    ]
    assert plans.plan(load(), Path("run.toml")).of("label") == ()


def test_a_run_that_waits_for_a_labeler_without_a_name_is_refused() -> None:
    plans.check_labeler(load())
    with pytest.raises(ConfigurationError, match=re.escape("set labeling.labeler to judge")):
        plans.check_labeler(load(flags=LABELED))


def test_clients_of_gateways_wait_for_them_at_the_port_of_each() -> None:
    config = load(flags=["gateway.port=8100", "gateway.processes=2"])
    roles = plans.plan(config, Path("run.toml"))
    assert [spec.address for spec in roles.of("gateway")] == [("127.0.0.1", 8100), ("127.0.0.1", 8101)]
    assert {spec.address for spec in roles.consumers} == {None}


def test_engines_of_others_are_updated_by_one_role_that_is_ready_before_rollouts_are_produced() -> None:
    config = load(flags=['serving.urls=["http://127.0.0.1:8000"]'])
    roles = plans.plan(config, Path("run.toml"))
    (spec,) = roles.of("serve-weights")
    assert spec.arguments[3:5] == ("role", "serve-weights")
    assert spec in roles.consumers
    assert plans.plan(load(), Path("run.toml")).of("serve-weights") == ()


def test_a_vllm_that_a_run_starts_alone_answers_its_workers_and_is_kept_on_the_newest_version() -> None:
    config = plans.settle(load(flags=[f"serving.python={sys.executable}"]))
    [url] = config.serving.urls
    assert config.worker.inference_urls == (f"{url}/v1",)
    roles = plans.plan(config, Path("run.toml"))
    assert roles.of("infer") == ()
    assert [spec.name for spec in roles.of("engine", "serve-weights")] == ["engine", "serve-weights"]
    assert all(spec in roles.consumers for spec in roles.of("engine", "serve-weights"))
    named = plans.settle(load(flags=[f"serving.python={sys.executable}", 'serving.urls=["http://127.0.0.1:8000"]']))
    assert named.serving.urls == ("http://127.0.0.1:8000",)
    assert plans.plan(plans.settle(load()), Path("run.toml")).of("engine") == ()


def test_a_run_with_a_tracker_has_one_sink_which_stops_last_and_without_which_the_run_goes_on() -> None:
    assert plans.plan(load(), Path("run.toml")).of("sink") == ()
    roles = plans.plan(load(flags=["tracker.to=jsonl"]), Path("run.toml"))
    (spec,) = roles.of("sink")
    assert "--follow" in spec.arguments
    assert spec.expendable
    # Roles stop in the reverse order of their start.
    assert roles.consumers[0] == spec


def test_a_role_is_given_the_secrets_that_it_uses_and_no_others() -> None:
    keys = {
        "grouper.signing_key": "GROUPING",
        "kafka.signing_key": "ROLLOUTS",
        "inference.api_key": "SERVER",
        "gateway.api_key": "SESSIONS",
        "labeling.judge.api_key": "JUDGE",
        "kafka.registry.password": "REGISTRY",
    }
    flags = [f"{key}=env:{name}" for key, name in keys.items()]
    config = load(flags=[*LABELED, *flags, "labeling.labeler=judge", "gateway.port=8100"], environment={})
    planned = plans.plan(config, Path("run.toml"))
    environment = plans.child_environment(config, dict.fromkeys(keys.values(), "secret"))

    def given(role: str) -> set[str]:
        changed = {**environment, **planned.of(role)[0].environment}
        return {name for name, value in changed.items() if value == "secret"}

    assert environment.keys() == set(keys.values())
    assert given("group") == {"REGISTRY", "GROUPING"}
    assert given("env") == {"REGISTRY", "ROLLOUTS", "SERVER"}, "workers ask the servers with the servers' key"
    assert given("gateway") == {"REGISTRY", "ROLLOUTS", "SERVER", "SESSIONS"}
    assert given("label") == {"REGISTRY", "ROLLOUTS", "JUDGE"}
    assert given("infer") == {"REGISTRY", "SERVER"}
    assert given("learn") == {"REGISTRY"}


RESERVES = "XLA_PYTHON_CLIENT_PREALLOCATE"
JAX_MEMORY = (RESERVES, "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_ALLOCATOR")


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch):
    """A function that returns the variables that a run with these settings gives its processes, by their names."""
    for name in JAX_MEMORY:
        monkeypatch.delenv(name, raising=False)

    def planned(*flags: str) -> dict[str, dict[str, str]]:
        roles = plans.plan(load(flags=flags, environment={}), Path("run.toml"))
        specs = (*roles.consumers, *roles.producers)
        return {spec.name: {name: value for name, value in spec.environment.items() if value} for spec in specs}

    return planned


def test_learners_and_servers_of_a_run_reserve_no_memory_of_a_gpu_which_they_may_share(variables) -> None:
    given = variables()
    assert given.pop("learn") == given.pop("infer") == {RESERVES: "false"}
    assert not any(given.values()), "only these two use JAX"
    vllm = variables(f"serving.python={sys.executable}", 'serving.urls=["http://127.0.0.1:8000"]')
    assert (vllm["learn"], vllm["engine"]) == ({RESERVES: "false"}, {})
    elsewhere = variables("inference.replicas=0")
    assert not any(elsewhere.values()), "a learner that is alone reserves memory, as JAX does by default"


@pytest.mark.parametrize("name", JAX_MEMORY)
def test_users_who_say_how_jax_takes_memory_are_obeyed(variables, name: str, monkeypatch) -> None:
    monkeypatch.setenv(name, "0.4")
    assert not any(variables().values())


def test_processes_have_the_gpus_that_are_named_for_them_by_number(variables) -> None:
    given = variables(
        "learner.processes=2",
        "inference.replicas=3",
        'supervisor.learner_gpus=["0,1", "2,3"]',
        'supervisor.inference_gpus=["4", "5", "6"]',
    )
    seen = {name: of_process["CUDA_VISIBLE_DEVICES"] for name, of_process in given.items() if of_process}
    assert seen == {"learn": "0,1", "learn-1": "2,3", "infer": "4", "infer-1": "5", "infer-2": "6"}


def test_a_server_that_is_added_while_the_run_goes_on_shares_the_gpu_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in JAX_MEMORY:
        monkeypatch.delenv(name, raising=False)
    config = load(flags=['supervisor.learner_gpus=["0"]', 'supervisor.inference_gpus=["1"]'], environment={})
    first, added = (plans.process_spec(config, Path("run.toml"), role_of("infer"), number) for number in (0, 1))
    assert added.environment["CUDA_VISIBLE_DEVICES"] == first.environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert added.environment[RESERVES] == first.environment[RESERVES] == "false"


def test_without_a_port_nothing_is_added_and_nothing_written(tmp_path: Path) -> None:
    config = load(flags=[f"data_dir={tmp_path}"])
    roles = plan(config, Path("run.toml"))
    ports = ServicePorts(config)
    assert ports.place(roles.of("learn")[0]) is roles.of("learn")[0]
    assert not ports.path.exists()


def test_every_process_gets_a_port_after_that_of_the_supervisor_and_keeps_it(tmp_path: Path) -> None:
    config = load(flags=[f"data_dir={tmp_path}", "service.port=9100", "grouper.processes=2"])
    roles = plan(config, Path("run.toml"))
    ports = ServicePorts(config)
    placed = [ports.place(spec) for spec in (*roles.consumers, *roles.of("env"))]
    assert [spec.arguments[-1] for spec in placed] == [f"service.port={port}" for port in range(9101, 9107)]
    assert ports.place(roles.of("group")[1]) == placed[3]
    targets = json.loads(ports.path.read_text())
    assert {entry["labels"]["__meta_process"]: entry["targets"] for entry in targets} == {
        "supervisor": ["127.0.0.1:9100"],
        **{spec.name: [f"127.0.0.1:{port}"] for port, spec in enumerate(placed, 9101)},
    }
    assert {entry["labels"]["__meta_run"] for entry in targets} == {"main"}


def test_a_list_that_cannot_be_written_is_logged_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "runs").write_text("a file where the folder should be")
    config = load(flags=[f"data_dir={tmp_path}", "service.port=9100"])
    ports = ServicePorts(config)
    spec = plan(config, Path("run.toml")).of("group")[0]
    with caplog.at_level("WARNING"):
        assert ports.place(spec).arguments[-1] == "service.port=9101"
        ports.retire(spec.name)
    assert [record.message for record in caplog.records] == ["targets_not_written"] * 2


def test_a_process_that_was_retired_is_not_listed_until_it_comes_back_with_its_port(tmp_path: Path) -> None:
    config = load(flags=[f"data_dir={tmp_path}", "service.port=9100", "grouper.processes=2"])
    first, second = plan(config, Path("run.toml")).of("group")
    ports = ServicePorts(config)
    placed = ports.place(first), ports.place(second)

    def listed() -> list[str]:
        return [entry["labels"]["__meta_process"] for entry in json.loads(ports.path.read_text())]

    ports.retire("group-1")
    assert listed() == ["supervisor", "group-0"]
    assert ports.place(second) == placed[1]
    assert listed() == ["supervisor", "group-0", "group-1"]
