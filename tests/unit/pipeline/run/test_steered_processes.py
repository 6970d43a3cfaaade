"""Numbers of processes that operators want, for the configuration of a run."""

import socket
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rollstream.infra.broker.ports import free_port_row
from rollstream.pipeline.config import RunConfig, load
from rollstream.pipeline.deployment.description import counts, role_of
from rollstream.pipeline.run.plan import ServicePorts, process_spec
from rollstream.pipeline.run.run_environments import played_by
from rollstream.pipeline.run.steered_processes import SteeredProcesses, begin_with, with_numbers
from rollstream.pipeline.run.supervised_role import RoleSpec
from rollstream.topics.control.steering import NOW, DesiredState
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.records import DesiredProcesses, EvaluationRequest, RequestAnswer
from tests.support.waiting import eventually


def wanted(**numbers: int) -> DesiredState:
    return DesiredState({role: DesiredProcesses(role=role, processes=number) for role, number in numbers.items()})


def begun(config: RunConfig, **numbers: int) -> dict[str, int]:
    return counts(begin_with(config, wanted(**numbers)))


@dataclass
class Roles:
    """Roles that take as long to end as a test wants."""

    started: list[str] = field(default_factory=list)
    held: set[str] = field(default_factory=set)

    @property
    def pids(self) -> dict[str, int]:
        return dict.fromkeys(self.held, 1)

    def start(self, *specs: RoleSpec) -> None:
        self.started += [spec.name for spec in specs]
        self.held |= {spec.name for spec in specs}

    def retire(self, *names: str) -> None:
        assert self.held.issuperset(names)

    def holds(self, name: str) -> bool:
        return name in self.held


def steered_run(
    config: RunConfig,
    running: RunConfig,
    roles: Roles,
    lines: list[str],
    kept: list[tuple[str, int, int | None]],
    answers: list[tuple[str, float, str]] | None = None,
) -> SteeredProcesses:
    return SteeredProcesses(
        config,
        running,
        config.run_dir / "run.toml",
        roles,
        ServicePorts(config),
        scaler=None,
        say=lines.append,
        put_back=lambda refused, processes: kept.append((refused.role, refused.processes, processes)),
        answer=lambda *answer: None if answers is None else answers.append(answer),
    )


def test_a_run_begins_with_the_numbers_that_are_wanted_and_others_are_as_configured() -> None:
    config = load()
    before = counts(config)
    assert begun(config, env=3, group=1) == before | {"env": 3, "group": 1}


def test_more_grouping_processes_than_partitions_are_never_begun() -> None:
    assert begun(load(flags=["topics.partitions=3"]), group=9)["group"] == 3


def test_a_number_that_the_capacity_has_no_room_for_is_told_once_and_the_others_hold(tmp_path: Path) -> None:
    config = load(flags=[f"data_dir={tmp_path}"])
    with pytest.raises(ConfigurationError, match="rollouts be outstanding"):
        with_numbers(config, {"env": 512})
    state = wanted(env=512, group=1)
    running = begin_with(config, state)
    assert (counts(running)["env"], counts(running)["group"]) == (counts(config)["env"], 1)
    lines, kept = list[str](), list[tuple[str, int, int | None]]()
    steered = steered_run(config, running, Roles(), lines, kept)
    for _ in range(2):
        steered.poll(state)
    assert len(lines) == 1
    assert "env=512 is not followed: max_policy_lag" in lines[0]
    assert kept == [("env", 512, None)], "the configured number holds again"


def test_a_server_whose_port_is_in_use_is_not_begun_unless_it_already_runs(tmp_path: Path) -> None:
    port = free_port_row("127.0.0.1", 2)
    config = load(flags=[f"inference.port={port}", f"data_dir={tmp_path}"])
    state, lines, kept = wanted(infer=2), list[str](), list[tuple[str, int, int | None]]()
    with socket.create_server(("127.0.0.1", port + 1)):
        running = begin_with(config, state)
        steered_run(config, running, Roles(), lines, kept).poll(state)
        assert counts(begin_with(config, state, {"infer-1"}))["infer"] == 2
    assert counts(running)["infer"] == 1
    assert [line.partition(": ")[0] for line in lines] == ["infer=2 is not followed"]
    assert kept == [("infer", 2, None)]


def test_gateways_and_evaluators_follow_numbers_where_the_run_has_them() -> None:
    config = load(flags=["gateway.port=8100", "evaluation.every_versions=10"])
    numbers = begun(config, gateway=3, eval=2)
    assert (numbers["gateway"], numbers["eval"]) == (3, 2)
    assert not {"gateway", "eval"} & begun(load(), gateway=3, eval=2).keys()
    ports = [process_spec(config, Path("run.toml"), role_of("gateway"), number).arguments[-1] for number in (1, 2)]
    assert ports == ["gateway.port=8101", "gateway.port=8102"]
    names = [process_spec(config, Path("run.toml"), role_of("eval"), number).name for number in (0, 1)]
    assert names == ["eval", "eval-1"]


def test_a_role_that_the_run_does_not_have_stays_out() -> None:
    config = load(flags=['worker.inference_urls=["http://127.0.0.1:9/v1"]'])
    assert "infer" not in begun(config, infer=2)


def test_a_server_is_added_again_while_the_former_one_of_its_port_still_drains(tmp_path: Path) -> None:
    port = free_port_row("127.0.0.1", 3)
    config = load(flags=[f"inference.port={port}", "inference.replicas=2", f"data_dir={tmp_path}"])
    roles, lines, kept = Roles(held={"infer", "infer-1"}), list[str](), list[tuple[str, int, int | None]]()
    steered = steered_run(config, config, roles, lines, kept)
    with socket.create_server(("127.0.0.1", port + 1)):  # infer-1 answers what it has admitted
        steered.poll(wanted(infer=1))
        steered.poll(wanted(infer=2))
    assert lines == ["infer has 2 processes and will have 1", "infer has 1 processes and will have 2"]
    assert roles.started == []
    roles.held.remove("infer-1")

    def started() -> bool:
        steered.poll(wanted(infer=2))
        return roles.started == ["infer-1"]

    eventually(started, 60, "the next server of this port")
    with socket.create_server(("127.0.0.1", port + 2)):
        steered.poll(wanted(infer=3))
    assert "infer=3 is not followed: port" in lines[-1]
    assert kept == [("infer", 3, None)], "the configured number holds again"


def test_a_run_without_workers_gives_up_the_ones_that_were_added(tmp_path: Path) -> None:
    config = load(flags=["gateway.port=8100", "supervisor.workers=0", f"data_dir={tmp_path}"])
    roles, lines = Roles(), list[str]()
    steered = steered_run(config, config, roles, lines, [])
    steered.poll(wanted(env=1))
    assert roles.started == ["env-0"]
    steered.poll(wanted())
    assert lines == ["env has 0 processes and will have 1", "env has 1 processes and will have 0"]


def test_a_refused_number_of_workers_in_a_run_without_any_leaves_no_record(tmp_path: Path) -> None:
    config = load(flags=["gateway.port=8100", "supervisor.workers=0", f"data_dir={tmp_path}"])
    lines, kept = list[str](), list[tuple[str, int, int | None]]()
    steered_run(config, config, Roles(), lines, kept).poll(wanted(env=512))
    assert "env=512 is not followed: max_policy_lag" in lines[0]
    assert kept == [("env", 512, None)]


def test_a_run_goes_on_though_a_number_of_zero_processes_is_on_record(tmp_path: Path) -> None:
    config = load(flags=["gateway.port=8100", "supervisor.workers=0", f"data_dir={tmp_path}"])
    running = begin_with(config, wanted(env=0))
    steered_run(config, running, Roles(), [], []).poll(wanted(env=0))
    assert "env" not in counts(running)


@pytest.mark.parametrize(
    ("role", "settings"), [("gateway", ["gateway.port=65535"]), ("infer", ["inference.port=65535"])]
)
def test_a_server_that_would_have_no_port_is_not_added(role: str, settings: list[str], tmp_path: Path) -> None:
    config = load(flags=[*settings, f"data_dir={tmp_path}"])
    state, lines, kept = wanted(**{role: 2}), list[str](), list[tuple[str, int, int | None]]()
    running = begin_with(config, state)
    steered_run(config, running, Roles(held={role}), lines, kept).poll(state)
    assert counts(running)[role] == 1
    assert len(lines) == 1
    assert f"{role}=2 is not followed: " in lines[0]
    assert "it must be between 0 and 65535" in lines[0]
    assert kept == [(role, 2, None)]


def requests(time: float, **numbers: int) -> dict[str, DesiredProcesses]:
    return {
        name.replace("__", ":"): DesiredProcesses(role=name.replace("__", ":"), processes=number, wall_time=time)
        for name, number in numbers.items()
    }


def test_each_request_is_answered_once_and_a_refusal_names_its_reason(tmp_path: Path) -> None:
    config = load(flags=[f"data_dir={tmp_path}"])
    lines, kept, answers = list[str](), list[tuple[str, int, int | None]](), list[tuple[str, float, str]]()
    steered = steered_run(config, config, Roles(), lines, kept, answers)
    state = DesiredState(
        requests(1.0, env=512, infer=1, gateway=2), evaluations={NOW: EvaluationRequest(version=3, wall_time=4.0)}
    )
    state.answers["processes:infer"] = RequestAnswer(wall_time=1.0)
    for _ in range(2):
        steered.poll(state)
    refused = {request: (time, text) for request, time, text in answers}
    assert len(answers) == 3, "an earlier supervisor answered the fourth"
    assert refused["processes:env"][1].startswith("env=512 is not followed: max_policy_lag")
    assert refused["processes:gateway"] == (1.0, "gateway=2 is not followed: this run has no role gateway")
    assert refused["evaluate:now"] == (4.0, "it has no evaluator; set evaluation.every_versions")
    answers.clear()
    steered.poll(DesiredState(requests(2.0, env=2)))
    assert answers == [("processes:env", 2.0, "")]


def test_workers_of_an_environment_are_refused_beyond_the_workers_and_where_a_worker_would_idle(tmp_path: Path) -> None:
    mixture = ["environments=[{use='dsort3', workers=1}, {use='add', workers=2}]", "supervisor.workers=2"]
    config = load(flags=[f"data_dir={tmp_path}", *mixture])
    kept, answers = list[tuple[str, int, int | None]](), list[tuple[str, float, str]]()
    steered = steered_run(config, config, Roles(), [], kept, answers)
    for time, number in enumerate((2, 3), 1):
        steered.poll(DesiredState(requests(float(time), env__dsort3=number)))
    steered.poll(DesiredState(requests(3.0, env__add=1)))
    steered.poll(DesiredState(requests(4.0, env__odd=1)))
    texts = [text.partition(": ")[2] for _request, _time, text in answers]
    assert texts == [
        "",
        "the run has 2 workers; add some by `rollstream steer scale env=3` first",
        "worker 1 would have nothing to play",
        "no entry of environments has the name odd",
    ]
    assert kept == [("env:dsort3", 3, None), ("env:add", 1, None), ("env:odd", 1, None)]
    plays = [
        [entry.use for entry in played_by(config, 1, numbers)] for numbers in ({}, {"env:dsort3": 2, "env:add": 1})
    ]
    assert plays == [["add"], ["dsort3"]]
