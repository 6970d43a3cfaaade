"""Command line tools as the users `audit` and `operate` of a secured broker: what each is for succeeds, and what it may
not do is refused in one clear line. Every command is a process that connects with TLS and a password, as a user's does.
"""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from rollstream.consumers.trainers.step_writer import StepWriter
from rollstream.pipeline.control import steering
from rollstream.topics.config import KafkaConfig
from rollstream.topics.records import Metrics
from rollstream.topics.wire.codec import encode
from tests.support import planted
from tests.support.command_line import answer_of, in_full
from tests.support.planted import Planted
from tests.support.runs import RealRun
from tests.support.secured_broker import SecuredBroker, secured_broker
from tests.support.waiting import eventually

RUN, NEIGHBOUR = "governed", "neighbour"
USERS = ("audit", "operate", "group", "prune")
JUDGE = """
def judge(rollout):
    return 1.0 - rollout.reward
"""
SETTINGS = """
data_dir = "{folder}"

[kafka]
bootstrap_servers = "{address}"

[kafka.client]
{client}

[topics]
partitions = 2

[grouping]
batch_rollouts = 8
max_batch_age_s = 0.5
group_deadline_s = 1.0
max_policy_lag = 1
"""
MEND = """
from rollstream.consumers.grouping.testing import example_rollout

def fix(value, key, headers):
    return example_rollout("mended")
"""
REFUSED = "lacks a permission|may not (Write|Alter|Create|Delete)|need the right"


@dataclass
class Governed:
    """A run with planted facts on a secured broker, and users with their documented rules."""

    broker: SecuredBroker
    planted: Planted

    @property
    def folder(self) -> Path:
        return self.planted.run.directory

    def settings(self, user: str) -> Path:
        """The settings of a user, as docs/security.md has them."""
        file, password = self.folder / f"{user}.toml", self.folder / "password"
        password.write_text("the password")
        client = self.broker.client(f"{RUN}-{user}", f"file:{password}")
        address = client.pop("bootstrap.servers")
        keys = "\n".join(f'"{name}" = "{value}"' for name, value in client.items())
        file.write_text(SETTINGS.format(folder=self.folder / user, address=address, client=keys))
        return file

    def command(self, user: str, *words: str, run: str = RUN) -> list[str]:
        where = ("--config", str(self.settings(user)), "--run", run)
        return [sys.executable, "-P", "-m", "rollstream", *in_full(words), *where]

    def said(self, user: str, *words: str, run: str = RUN) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            self.command(user, *words, run=run),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )


@pytest.fixture(scope="module")
def governed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Governed]:
    folder = tmp_path_factory.mktemp("governed")
    with secured_broker(folder / "broker") as broker:
        run = RealRun(KafkaConfig(bootstrap_servers=broker.open), RUN, folder)
        try:
            made = Governed(broker, planted.plant(run))
            broker.add_users({f"{RUN}-{user}": "the password" for user in USERS})
            roles = [word for user in USERS for word in ("--role", user)]
            rules = answer_of(folder, "topics", "acls", "apply", *roles, "--run", RUN, "-b", broker.open)
            assert rules.returncode == 0, rules.stderr
            made_beside = answer_of(folder, "topics", "apply", "--run", NEIGHBOUR, "-b", broker.open)
            assert made_beside.returncode == 0, made_beside.stderr
            with StepWriter(run.kafka, RUN, take_over=True) as trainer:
                assert trainer.publish_version({"kernel": np.ones((2, 3), np.float32)}) == 7
            (folder / "judge.py").write_text(JUDGE)
            (folder / "mend.py").write_text(MEND)
            (folder / "nothing").mkdir()
            yield made
        finally:
            run.stop()


READING = {
    "ledger": 0,
    "ledger --by env --json": 0,
    "verify": 0,
    "lineage --batch 0-0": 0,
    "lineage --offset 0:0": 0,
    "lineage --step 1": 0,
    "lineage --policy 6": 0,
    "show good0-0": 0,
    "replay": 0,
    "replay --set grouping.estimator=grpo": 0,
    "top --once": 0,
    "cat rollouts": 0,
    "cat dead-letters --json": 0,
    "dlq ls": 0,
    "dlq redrive --dry-run": 1,
    "runs": 0,
    "weights ls": 0,
    "topics plan": 0,
    "topics describe": 0,
    "groups": 0,
    "report -o report.html": 0,
    "prune --dry-run --keep-batches 0": 0,
    "exclude --env env --dry-run": 0,
    "scale": 0,
    "stop": 0,
    "environment show": 0,
    "doctor --role audit": 0,
}
"""Commands that only read, with the exit code of each; a dry redrive ends with 1, as the letter is sound nowhere."""


@pytest.mark.long
def test_whoever_audits_may_do_all_that_only_reads(governed: Governed) -> None:
    for words, code in READING.items():
        answer = governed.said("audit", *words.split())
        assert answer.returncode == code, f"{words}: {answer.returncode}\n{answer.stdout}\n{answer.stderr}"
        assert answer.stdout, words
        assert not re.search(REFUSED, answer.stderr), f"{words}: {answer.stderr}"


CHANGING = (
    "topics apply",
    "topics acls plan",
    "topics acls apply",
    "broker mend",
    "environment pause env --reason x",
    "environment weigh env=2",
    "scale group=2",
    "scale group=auto",
    "stop --at-step 1000",
    "stop --drain",
    "stop --withdraw",
    "evaluate",
    "exclude --env env",
    "group recover",
    "group adopt",
    "group pause 0 --reason x",
    "learner retire main",
    "weights rollback 7 --reason x --take-over",
    "dlq redrive --fix mend.py",
    "rescore --verifier judge.py:judge",
    "rescore --verifier judge.py:judge --into elsewhere",
    "replay --set grouping.estimator=grpo --into elsewhere",
    "import nothing run:governed",
    "prune --yes --keep-batches 0",
)
"""Commands that change a run, or see what only operators of the cluster see."""


@pytest.mark.long
def test_whoever_audits_changes_nothing_and_is_told_so_in_one_line(governed: Governed) -> None:
    for words in CHANGING:
        refusal(governed.said("audit", *words.split()), words)


def refusal(answer: "subprocess.CompletedProcess[str]", words: str) -> None:
    """Assert that a command was refused, and says so in one line."""
    lines = [line for line in answer.stderr.splitlines() if line.startswith("rollstream: ")]
    assert "Traceback" not in answer.stderr, answer.stderr
    assert (answer.returncode, len(lines)) == (2, 1), f"{words}: {answer.returncode}\n{answer.stdout}\n{answer.stderr}"
    assert re.search(f"{REFUSED}|authorization failed", lines[0]), f"{words}: {lines[0]}"


OPERATING = {
    "topics plan": 0,
    "topics apply": 0,
    "stop --at-step 1000": 0,
    "stop --withdraw": 0,
    "scale group=2": 0,
    "scale group=auto": 0,
    "environment pause env --reason x": 0,
    "environment resume env": 0,
    "environment weigh env=2": 0,
    "evaluate": 0,
    "dlq redrive": 1,
    "exclude --env env": 0,
    "group pause 0 --reason x": 0,
    "group resume 0": 0,
    "rescore --verifier judge.py:judge": 0,
    "weights rollback 7 --reason x --take-over": 0,
    "learner retire main": 0,
    "learner resume main": 0,
    "ledger": 0,
    "doctor --role operate": 0,
    "prune --dry-run --keep-batches 0": 0,
    "prune --yes --keep-batches 0": 0,
}
"""Commands that change a run, in an order in which each can, while a grouping process runs. A redrive ends with 1, as
the letter is sound nowhere; an exclusion waits until the grouping process has obeyed it."""
WITHDRAWN = ("environment resume env", "group resume 0", "learner resume main")
"""Those of them that only a decision of an operator makes possible, for whoever audits to try first."""


@pytest.mark.long
def test_whoever_operates_may_do_all_that_changes_a_run(governed: Governed) -> None:
    log = governed.folder / "grouping.log"
    with log.open("wb") as output:
        grouping = subprocess.Popen(
            governed.command("group", "group"), cwd=governed.folder, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        for words, code in OPERATING.items():
            if words in WITHDRAWN:
                refusal(governed.said("audit", *words.split()), words)
            answer = governed.said("operate", *words.split())
            assert answer.returncode == code, f"{words}: {answer.returncode}\n{answer.stdout}\n{answer.stderr}"
            assert not re.search(REFUSED, answer.stderr), f"{words}: {answer.stderr}"
        assert grouping.poll() is None, log.read_text()[-3000:]
    finally:
        grouping.terminate()
        assert grouping.wait(300) == 0, log.read_text()[-3000:]


@pytest.mark.long
def test_a_grouping_process_has_all_rights_that_a_drain_needs(governed: Governed) -> None:
    run, log = governed.planted.run, governed.folder / "drained.log"
    # Without the last metrics of workers, a drain waits a minute longer.
    ended = Metrics(component="env-0", timestamp=time.time(), labels={"role": "env"}, values={"running": 0.0})
    run.send_bytes("metrics", encode(ended), b"env-0")
    answer = governed.said("operate", "stop", "--drain")
    assert answer.returncode == 0, answer.stderr
    with log.open("wb") as output:
        grouping = subprocess.Popen(
            governed.command("group", "group"), cwd=governed.folder, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        eventually(lambda: steering.state(run.kafka, RUN)["drain"] == "done", 120, "the end of the drain")
        assert grouping.wait(120) == 0
    finally:
        print(log.read_text()[-3000:])
        grouping.kill()
        grouping.wait()


@pytest.mark.long
def test_operators_of_one_run_see_and_change_nothing_of_another(governed: Governed) -> None:
    for words in ("ledger", "cat rollouts", "stop --at-step 7", "topics apply", "exclude --env env"):
        refusal(governed.said("operate", *words.split(), run=NEIGHBOUR), words)


@pytest.mark.long
def test_prune_needs_the_steps_and_the_control_of_another_run_whose_steps_it_sees(governed: Governed) -> None:
    def grant(topic: str) -> None:
        resource = {"type": "topic", "name": f"{NEIGHBOUR}.{topic}", "patternType": "literal"}
        rule = {"resource": resource, "operations": ["Read"]}
        governed.broker.admit({f"{RUN}-prune": "the password"}, [(f"{RUN}-prune", rule)])

    def ends_with(code: int) -> "subprocess.CompletedProcess[str] | None":
        answer = governed.said("prune", "prune", "--dry-run", "--keep-batches", "0")
        return answer if answer.returncode == code else None

    eventually(lambda: ends_with(0), 60, "a plan without the neighbour")
    grant("steps")
    answer = eventually(lambda: ends_with(2), 60, "a refusal")
    assert answer is not None
    refusal(answer, "prune")
    assert f"grant it READ on both by hand, because no rule of run {RUN} does" in answer.stderr
    assert "acls apply" not in answer.stderr
    grant("control")
    eventually(lambda: ends_with(0), 60, "a plan with the neighbour")
