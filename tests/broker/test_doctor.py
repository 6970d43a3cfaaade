"""`rollstream doctor` on real brokers: it finds nothing where all is right, and each fault with its remedy."""

import json
import re
import shlex
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from rollstream.pipeline.config import load
from rollstream.pipeline.doctor import clock
from rollstream.pipeline.doctor.cluster import check_settings
from rollstream.pipeline.doctor.retention import oldest_unfinished
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka import topic_admin
from tests.support.command_line import answer_of
from tests.support.runs import RealRun, rollout
from tests.support.secured_broker import SecuredBroker, secured_broker
from tests.unit.pipeline.doctor.test_cluster import RIGHT

RUN = "patient"
ROLES = ("env", "learn", "group", "audit")


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredBroker]:
    folder = tmp_path_factory.mktemp("doctor")
    with secured_broker(folder / "broker") as broker:
        for words in (("topics", "apply"), ("topics", "acls", "apply")):
            assert answer_of(folder, *words, "--run", RUN, "-b", broker.open).returncode == 0
        broker.add_users({f"{RUN}-{role}": "the password" for role in ROLES})
        yield broker


def examined(
    secured: SecuredBroker, folder: Path, user: str, role: str, *more: str
) -> tuple[int, list[dict[str, Any]]]:
    """Exit code of the command, run as a user of the run, and what it finds."""
    (folder / "password").write_text("the password")
    client = {**secured.client(f"{RUN}-{user}", ""), "sasl.password": f"file:{folder / 'password'}"}
    flags = [word for key, value in client.items() for word in ("-X", f"{key}={value}")]
    answer = answer_of(folder, "doctor", "--json", "--role", role, "--run", RUN, *flags, *more)
    assert answer.returncode in (0, 1), answer.stderr
    assert "the password" not in answer.stdout + answer.stderr
    return answer.returncode, json.loads(answer.stdout)


def faults(findings: list[dict[str, Any]]) -> list[str]:
    return [finding["text"] for finding in findings if finding["level"] == "fault"]


@pytest.mark.parametrize("role", [pytest.param(r, marks=() if r == "group" else pytest.mark.long) for r in ROLES])
def test_a_user_with_its_own_rules_has_no_fault(secured: SecuredBroker, tmp_path: Path, role: str) -> None:
    code, findings = examined(secured, tmp_path, role, role)
    assert (code, faults(findings)) == (0, [])
    [permissions] = [finding for finding in findings if finding["check"] == "permissions"]
    assert permissions["text"] == f"this user may do what {role} needs, and nothing else in the run"
    assert [f["text"] for f in findings if f["check"] == "versions" and "brokers 4" in f["text"]]


def test_a_user_in_the_place_of_another_lacks_rights_and_has_others(secured: SecuredBroker, tmp_path: Path) -> None:
    code, findings = examined(secured, tmp_path, "env", "learn")
    assert code == 1
    text = "\n".join(faults(findings))
    for part in (
        "learn needs Write on topic patient.steps, which this user does not have",
        "learn needs Write on transactional id patient/learner, which this user does not have",
        "this user may Describe, Read, Write on topic patient.rollouts, which learn does not need",
        "this user may Describe on group patient.labeller, which learn does not need",
    ):
        assert part in text
    assert all(finding["remedy"] for finding in findings if finding["level"] == "fault")


def test_rights_of_roles_that_share_a_principal_are_no_fault(secured: SecuredBroker, tmp_path: Path) -> None:
    shared = ("--set", f"topics.principal=User:{RUN}-audit")
    _code, findings = examined(secured, tmp_path, "audit", "env", *shared)
    lacking = [finding for finding in findings if finding["check"] == "permissions" and finding["level"] == "fault"]
    assert {"env needs Write on topic patient.rollouts, which this user does not have"} <= {f["text"] for f in lacking}
    assert not [text for text in faults(findings) if "does not need" in text]
    for finding in lacking:
        command = f"rollstream topics acls apply --role env --run {RUN} {shlex.join(shared)} -X "
        assert finding["remedy"].startswith(command)


@pytest.mark.long
def test_a_topic_with_another_retention_or_none_at_all_is_a_fault(real_run: RealRun, tmp_path: Path) -> None:
    address, run = real_run.kafka.bootstrap_servers, real_run.name

    def doctor(*flags: str) -> tuple[int, str]:
        answer = answer_of(tmp_path, "doctor", "--run", run, "-b", address, *flags)
        return answer.returncode, answer.stdout

    code, text = doctor()
    assert code == 1
    assert f"topic {run}.rollouts is missing" in text
    assert f"-> rollstream topics apply --run {run} -b {address}\n" in text
    real_run.prepare()
    code, text = doctor("--set", f"topics.partitions={real_run.topics.partitions}")
    assert code == 0, text
    entry = ConfigEntry("retention.ms", "7200000", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, f"{run}.rollouts", incremental_configs=[entry])
    admin = AdminClient({"bootstrap.servers": address})
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(60)
    code, text = doctor("--set", f"topics.partitions={real_run.topics.partitions}")
    assert code == 1
    assert f"{run}.rollouts keeps records for 2.0 h" in text
    assert "that grouping has not finished" not in text, "nothing was sent yet"
    real_run.send([rollout("open", 0)])
    _code, text = doctor("--set", f"topics.partitions={real_run.topics.partitions}")
    assert re.search(
        r"the oldest record of \S+ that grouping has not finished, offset 0, is \d+ s old: brokers may ", text
    )
    assert "delete it in 2.0 h" in text
    code, text = doctor("--role", "env", "--set", f"topics.partitions={real_run.topics.partitions}")
    assert "this user may do everything" in text


def test_our_brokers_have_the_settings_that_roles_need(broker: str) -> None:
    [finding] = check_settings(load(flags=[f"kafka.bootstrap_servers={broker}"]))
    assert finding.level == "ok"
    assert topic_admin.broker_settings(KafkaConfig(bootstrap_servers=broker)).keys() >= RIGHT.keys()


@pytest.mark.long
def test_a_user_without_rights_on_a_cluster_without_topics_is_a_fault(secured: SecuredBroker, tmp_path: Path) -> None:
    secured.add_users({f"{RUN}-nobody": "the password"})
    (tmp_path / "password").write_text("the password")
    client = {**secured.client(f"{RUN}-nobody", ""), "sasl.password": f"file:{tmp_path / 'password'}"}
    flags = [word for key, value in client.items() for word in ("-X", f"{key}={value}")]
    answer = answer_of(tmp_path, "doctor", "--json", "--run", "empty", *flags)
    findings = json.loads(answer.stdout)
    assert (answer.returncode, [f["text"].partition(":")[0] for f in findings if f["level"] == "fault"]) == (
        1,
        ["this user sees no topic of run empty"],
    )
    assert [f["check"] for f in findings if f["level"] == "ok"] == ["brokers", "versions"]


def test_unfinished_records_that_are_gone_are_a_fault_with_their_remedy(real_run: RealRun, tmp_path: Path) -> None:
    real_run.prepare().send(rollout("open", member) for member in range(3))
    config = load(flags=[f"run={real_run.name}", f"kafka.bootstrap_servers={real_run.kafka.bootstrap_servers}"])
    [partition] = [place.partition for place in oldest_unfinished(config) if place.age_s is not None]
    topic_admin.delete_records(real_run.kafka, {(real_run.topic("rollouts"), partition): 2})
    flags = ("--run", real_run.name, "-b", real_run.kafka.bootstrap_servers)
    answer = answer_of(tmp_path, "doctor", "--set", f"topics.partitions={real_run.topics.partitions}", *flags)
    assert answer.returncode == 1
    assert "up to offset 0, and the log begins at 2: 2 records are gone" in answer.stdout
    assert "rollstream restore" in answer.stdout


@dataclass(frozen=True)
class ShiftedTime:
    """The module `time` as on a machine whose clock is ahead by some seconds."""

    ahead_s: float
    monotonic = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)

    def time(self) -> float:
        return time.time() + self.ahead_s


def test_a_clock_that_differs_is_a_fault_in_both_directions(
    real_run: RealRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_run.prepare()
    ended = threading.Event()
    clocks = (
        (0.0, "ok", "this clock and the brokers' differ by less than 5 s"),
        (60.0, "fault", r"this machine's clock is at least (5\d|60) s ahead of the brokers'"),
        (-60.0, "fault", r"this machine's clock is at least (5\d|60) s behind the brokers'"),
    )

    def goes_on() -> None:
        number = 0
        while not ended.wait(0.05):
            real_run.send([rollout(f"x{number}", 0)])
            number += 1

    worker = threading.Thread(target=goes_on)
    worker.start()
    flags = ("--json", "--run", real_run.name, "-b", real_run.kafka.bootstrap_servers)
    try:
        for ahead_s, level, text in clocks:
            monkeypatch.setattr(clock, "time", ShiftedTime(ahead_s))
            answer = answer_of(tmp_path, "doctor", *flags)
            [finding] = [finding for finding in json.loads(answer.stdout) if finding["check"] == "clock"]
            assert (finding["level"], bool(finding["remedy"])) == (level, level == "fault"), finding
            assert re.fullmatch(text, finding["text"]), finding
    finally:
        ended.set()
        worker.join()


@pytest.mark.long
def test_an_idle_run_cannot_tell_whether_a_clock_is_ahead_and_says_so(real_run: RealRun, tmp_path: Path) -> None:
    real_run.prepare()
    flags = ("--json", "--run", real_run.name, "-b", real_run.kafka.bootstrap_servers)

    def finding() -> dict[str, Any]:
        answer = answer_of(tmp_path, "doctor", *flags)
        [entry] = [entry for entry in json.loads(answer.stdout) if entry["check"] == "clock"]
        assert isinstance(entry, dict)
        return entry

    assert finding()["text"] == "there is no record yet whose time could be compared"
    real_run.send([rollout("x", 0)])
    assert (finding()["level"], finding()["remedy"]) == ("note", "run the check again while the run goes on")
