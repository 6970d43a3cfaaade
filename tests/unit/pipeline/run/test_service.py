"""The service port over real HTTP: what probes read at each phase, and what a stuck loop turns it to."""

import threading
from collections.abc import Iterator

import pytest

from rollstream.pipeline.config import ServiceConfig, load
from rollstream.pipeline.run.role_process import RolePhase
from rollstream.pipeline.run.service import ServiceServer
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.heartbeats import Heartbeats
from tests.support.probes import probe


class Role:
    """A role with a clock of its own, and its service port."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.phase = RolePhase()
        self.heartbeats = Heartbeats(lambda: self.now_s)
        self.server = ServiceServer(ServiceConfig(stall_s=30), phase=self.phase, heartbeats=self.heartbeats)

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
    assert "/livez /readyz" in text


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
        ServiceServer(ServiceConfig(port=taken))


def test_an_ipv6_address_is_served_and_written_in_brackets() -> None:
    with ServiceServer(ServiceConfig(host="::1"), phase=RolePhase(), heartbeats=Heartbeats()) as server:
        assert server.url.startswith("http://[::1]:")
        assert probe(f"{server.url}/livez")[0] == 200


@pytest.mark.parametrize("flag", ["service.port=70000", "service.stall_s=0"])
def test_settings_that_cannot_be_are_refused(flag: str) -> None:
    with pytest.raises(ConfigurationError, match=flag.partition("=")[0]):
        load(flags=[flag])
