"""A process of a role has the number that its flag says, or that of its host's name."""

import argparse
import os
import subprocess
import sys

import pytest

from rollstream.pipeline.command_line.cli import build_parser
from rollstream.pipeline.command_line.process_number import number, number_of_host
from rollstream.pipeline.deployment.description import ROLES, RoleDescription

NUMBERED = [role for role in ROLES if role.numbered]


@pytest.mark.parametrize(
    ("host", "expected"),
    [("run-group-3", 3), ("run-group-12.groups.ns.svc.cluster.local", 12), ("a-1-0", 0), ("worker-07", 7)],
)
def test_the_number_of_a_host_is_at_the_end_of_its_name(host: str, expected: int) -> None:
    assert number_of_host(host) == expected


@pytest.mark.parametrize(
    "host", ["localhost", "3f2a9c1b7d44", "group3", "group-3-", "group-3a", "group-", "", "h.run-3", "a-٣x"]
)
def test_a_host_without_a_number_at_the_end_is_refused_with_its_name(host: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        number_of_host(host)
    assert repr(host) in str(refused.value)
    assert "give the number itself" in str(refused.value)


@pytest.mark.parametrize("role", NUMBERED, ids=lambda role: role.name)
def test_every_role_with_a_number_takes_that_of_its_host(
    role: RoleDescription, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: f"run-{role.name}-5")
    args = build_parser().parse_args([*role.command, role.number_flag, "auto"])
    assert getattr(args, role.number_flag.removeprefix("--")) == 5
    given = build_parser().parse_args([*role.command, role.number_flag, "2"])
    assert getattr(given, role.number_flag.removeprefix("--")) == 2
    assert getattr(build_parser().parse_args([*role.command]), role.number_flag.removeprefix("--")) == 0


@pytest.mark.parametrize("text", ["-1", "1.5", "", "one", "²", "1" * 20])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"is not the number of a process; give 0, 1, \.\.\. or auto"):
        number(text)


def test_a_role_on_a_host_without_a_number_ends_with_one_line() -> None:
    host = "3f2a9c1b7d44"
    main = "from rollstream.pipeline.command_line.cli import main; main()"
    start = f"import socket; socket.gethostname = lambda: {host!r}; {main}"
    command = [sys.executable, "-P", "-c", start, "role", "group", "--ordinal", "auto"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ROLLSTREAM")}
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert answer.returncode == 2
    assert answer.stderr.startswith(f"rollstream: argument --ordinal: the host's name {host!r}")
    assert answer.stderr.count("\n") == 1
