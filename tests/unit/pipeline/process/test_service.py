"""The service port over real HTTP: what probes read at each phase, and when a loop is stuck."""

import threading
from collections.abc import Iterator

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rollstream.pipeline.config import ServiceConfig, load
from rollstream.pipeline.process.role_process import RolePhase
from rollstream.pipeline.process.service import ServiceServer
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.heartbeats import Heartbeats
from rollstream.topics.metrics.values import MetricValues
from tests.support.probes import probe


class Role:
    """A role with a clock of its own, and its service port."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.phase = RolePhase()
        self.heartbeats = Heartbeats(lambda: self.now_s)
        self.values = MetricValues()
        self.server = ServiceServer(
            ServiceConfig(stall_s=30),
            run="main",
            role="group",
            process="group-0",
            phase=self.phase,
            heartbeats=self.heartbeats,
            values=self.values,
        )

    def get(self, path: str) -> tuple[int, str]:
        return probe(self.server.url + path)


@pytest.fixture
def role() -> Iterator[Role]:
    role = Role()
    with role.server:
        yield role


def test_a_role_is_ready_from_its_announcement_to_the_request_to_stop(role: Role) -> None:
    assert role.get("/readyz") == (503, "starting\n")
    role.phase.ready()
    assert role.get("/readyz") == (200, "ok\n")
    role.phase.drain()
    role.phase.ready()
    assert role.get("/readyz") == (503, "draining\n"), "a role that was asked to stop does not become ready"


def test_a_role_is_alive_while_its_loop_turns_and_a_stuck_loop_is_named(role: Role) -> None:
    role.heartbeats.beat("grouping")
    role.now_s = 30
    assert role.get("/livez") == (200, "ok\n")
    role.now_s = 31
    assert role.get("/livez") == (503, "grouping: no progress for 31 s (service.stall_s is 30)\n")
    role.heartbeats.beat("grouping")
    assert role.get("/livez?verbose") == (200, "ok\n")


def test_other_paths_name_those_that_there_are(role: Role) -> None:
    status, text = role.get("/")
    assert status == 404
    assert "/livez /readyz /metrics" in text


def test_metrics_are_those_of_the_role_with_its_run_and_process(role: Role) -> None:
    role.phase.ready()
    role.heartbeats.beat("grouping")
    role.now_s = 3
    role.values.record("group", {"lag": 7.0, "open_groups": 2.0, "lag_per_s": 1.0}, {"partition": "1", "topic": "t"})
    role.values.record("group", {"batches_total": 4.0, "lag": 7.0})
    role.values.observe("rollstream_transaction_seconds", [0.02, 90.0])
    status, text = role.get("/metrics")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert status == 200
    values = {sample.name: (sample.labels, sample.value) for family in families.values() for sample in family.samples}
    own = {"run": "main", "process": "group-0"}
    assert values["rollstream_ready"] == (own, 1)
    assert values["rollstream_loop_age_seconds"] == ({**own, "loop": "grouping"}, 3)
    assert values["rollstream_grouping_lag"] == ({**own, "partition": "1"}, 7)
    assert values["rollstream_grouping_batches_total"] == (own, 4)
    assert families["rollstream_grouping_batches"].type == "counter"
    assert values["rollstream_transaction_seconds_count"] == (own, 2)
    assert values["rollstream_transaction_seconds_sum"] == (own, 90.02)
    assert values["rollstream_uncatalogued_metrics"] == (own, 0)
    assert values["process_resident_memory_bytes"][0] == own
    assert values["process_resident_memory_bytes"][1] > 0
    labels, started_s = values["process_start_time_seconds"]
    assert labels == own
    assert started_s == pytest.approx(psutil.Process().create_time(), abs=5)
    role.values.record("group", {"a_new_name": 1.0})
    assert 'rollstream_uncatalogued_metrics{process="group-0",run="main"} 1.0' in role.get("/metrics")[1]


def test_the_start_is_no_loop_of_the_metrics_once_a_loop_turns_and_the_limit_is_that_of_livez(role: Role) -> None:
    def series(name: str) -> dict[str, float]:
        families = text_string_to_metric_families(role.get("/metrics")[1])
        return {s.labels.get("loop", ""): s.value for f in families for s in f.samples if s.name == name}

    role.now_s = 40
    assert series("rollstream_loop_age_seconds") == {"start": 40}
    role.heartbeats.beat("grouping")
    assert series("rollstream_loop_age_seconds") == {"grouping": 0}
    assert series("rollstream_loop_stall_seconds") == {"": 30}


def test_many_probes_at_once_are_answered(role: Role) -> None:
    answers: list[int] = []
    probes = [threading.Thread(target=lambda: answers.append(role.get("/livez")[0])) for _ in range(40)]
    for each in probes:
        each.start()
    for each in probes:
        each.join()
    assert answers == [200] * 40


def test_a_port_in_use_is_an_error_that_names_the_setting(role: Role) -> None:
    taken = int(role.server.url.rpartition(":")[2])
    with pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1:{taken} .* set service.port"):
        ServiceServer(ServiceConfig(port=taken), run="main", role="group", process="group-0")


def test_an_ipv6_address_is_served_and_written_in_brackets() -> None:
    own = {"heartbeats": Heartbeats(), "values": MetricValues()}
    with ServiceServer(ServiceConfig(host="::1"), run="main", role="group", process="group-0", **own) as server:
        assert server.url.startswith("http://[::1]:")
        assert probe(f"{server.url}/livez")[0] == 200


@pytest.mark.parametrize("flag", ["service.port=70000", "service.stall_s=0"])
def test_settings_that_cannot_be_are_refused(flag: str) -> None:
    with pytest.raises(ConfigurationError, match=flag.partition("=")[0]):
        load(flags=[flag])
