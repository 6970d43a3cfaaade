"""Access rules on a broker that enforces them: each user may do what the rules say, and is refused everything else."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.deployment.access_rules import USERS, AccessRule, access_rules
from rollstream.pipeline.deployment.description import ROLES, expanded
from rollstream.topics.kafka.clients import READERS
from rollstream.topics.wire.catalogue import CATALOGUE, topic_name
from tests.support.access_trials import Trial, Trials
from tests.support.command_line import answer_of
from tests.support.secured_broker import SecuredBroker, secured_broker

pytestmark = pytest.mark.long  # a broker with an authorizer of its own; the short form has that of test_doctor

RUN, NEIGHBOURS = "exp", ("exp.b", "exp-lr")
IMPLIED = {"Describe": {"Read", "Write", "Delete", "Alter"}, "DescribeConfigs": {"AlterConfigs"}}
"""Operations that imply another (Kafka's AclAuthorizer)."""


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredBroker]:
    with secured_broker(tmp_path_factory.mktemp("secured") / "broker") as broker:
        yield broker


def run_command(secured: SecuredBroker, folder: Path, *words: str, run: str = RUN) -> str:
    answer = answer_of(folder, *words, "--run", run, "-b", secured.open)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def of_all_roles() -> list[str]:
    return [word for user in USERS for word in ("--role", user)]


@pytest.fixture(scope="module")
def prepared(secured: SecuredBroker, tmp_path_factory: pytest.TempPathFactory) -> SecuredBroker:
    """A broker with the topics of a run and its neighbours, and the users and rules of each."""
    folder = tmp_path_factory.mktemp("prepared")
    for run in (RUN, *NEIGHBOURS):
        run_command(secured, folder, "topics", "apply", "--set", "topics.partitions=1", run=run)
        run_command(secured, folder, "topics", "acls", "apply", *of_all_roles(), run=run)
    secured.add_users({f"{run}-{user}": f"password of {user}" for run in (RUN, *NEIGHBOURS) for user in USERS})
    return secured


def test_plan_shows_what_apply_then_adds_and_removes(secured: SecuredBroker, tmp_path: Path) -> None:
    def plan(*flags: str) -> dict[str, list[dict[str, object]]]:
        answer: dict[str, list[dict[str, object]]] = json.loads(
            run_command(secured, tmp_path, "topics", "acls", "plan", "--json", *flags, run="plans")
        )
        return answer

    first = plan()
    assert first["missing"]
    assert not first["present"]
    assert not plan()["present"], "a plan changes nothing"
    text = run_command(secured, tmp_path, "topics", "acls", "apply", run="plans")
    assert f"0 rules correct, {len(first['missing'])} to add" in text
    assert (plan()["missing"], plan()["surplus"]) == ([], [])
    # With another group name, the rules of the earlier one are surplus.
    later = plan("--set", "grouper.group=second")
    assert {entry["name"] for entry in later["surplus"]} == {"plans.grouper", "plans.grouper.turn-"}
    run_command(secured, tmp_path, "topics", "acls", "apply", "--set", "grouper.group=second", run="plans")
    assert plan("--set", "grouper.group=second")["surplus"] == []
    # A neighbour's principals and names are left alone.
    run_command(secured, tmp_path, "topics", "acls", "apply", run="plans.b")
    assert plan("--set", "grouper.group=second")["surplus"] == []


def test_a_whole_run_works_as_one_user_with_a_rule_for_each_prefix(secured: SecuredBroker, tmp_path: Path) -> None:
    """Ten rules suffice for the demo with its kills and its report."""
    one = ("--set", "topics.prefix_rules=true", "--set", "topics.principal=User:shared")
    text = run_command(secured, tmp_path, "topics", "acls", "apply", *one, run="shared")
    assert "0 rules correct, 10 to add, 0 surplus" in text
    secured.add_users({"shared": "the password"})
    (tmp_path / "password").write_text("the password")
    client = {**secured.client("shared", ""), "sasl.password": f"file:{tmp_path / 'password'}"}
    address = client.pop("bootstrap.servers")
    connected = [word for key, value in client.items() for word in ("-X", f"{key}={value}")]
    where = ("--run", "shared", "-b", address, *connected)
    answer = answer_of(tmp_path, "demo", "--steps", "2", "--data", str(tmp_path / "data"), *where)
    # In two steps nothing is learned, so the demo itself fails.
    assert "every record is in exactly one place" in answer.stdout, answer.stdout + answer.stderr
    assert "computed again from the log, 0 differences" in answer.stdout
    assert {denial for denial in secured.denied if denial[0] == "shared"} == set()
    checked = answer_of(tmp_path, "doctor", "--role", "learn", *one, *where)
    assert "this user may do what learn and the other users with its principal need, and nothing else" in checked.stdout


def test_rules_of_whoever_else_reaches_the_topics_are_shown(prepared: SecuredBroker, tmp_path: Path) -> None:
    rule = {"resource": {"type": "topic", "name": "*", "patternType": "literal"}, "operations": ["Write"]}
    prepared.admit({"stranger": "a password"}, [("stranger", rule)])
    text = run_command(prepared, tmp_path, "topics", "acls", "plan")
    # The run has no role `fill`, which may have been started by itself: its rules stay, below the others.
    _differences, others = text.split("other rules, left as they are:")
    assert re.search(r"User:stranger +topic +\* +Write", others)
    assert re.search(r"User:exp-fill +topic +exp.trajectories +Read", others)
    assert "remove" not in text
    assert "User:exp.b-env" not in text


def test_without_an_authorizer_and_without_the_right_the_command_says_so(
    broker: str, prepared: SecuredBroker, tmp_path: Path
) -> None:
    answer = answer_of(tmp_path, "topics", "acls", "plan", "--run", RUN, "-b", broker)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert "have no authorizer" in answer.stderr
    (tmp_path / "password").write_text("password of env")
    client = {**prepared.client(f"{RUN}-env", ""), "sasl.password": f"file:{tmp_path / 'password'}"}
    flags = [word for key, value in client.items() for word in ("-X", f"{key}={value}")]
    answer = answer_of(tmp_path, "topics", "acls", "plan", "--run", RUN, *flags)
    assert answer.returncode == 2
    assert "need the right Describe on the cluster, which this user lacks" in answer.stderr


@pytest.mark.parametrize(
    # Each user takes seven seconds; the role that runs code of environments is tried in every run of the tests.
    "user",
    USERS,
)
def test_a_user_may_do_what_its_rules_say_and_nothing_else(
    prepared: SecuredBroker, user: str, capsys: pytest.CaptureFixture[str]
) -> None:
    topics = [topic_name(run, spec.name) for run in (RUN, *NEIGHBOURS) for spec in CATALOGUE]
    groups, ids = names("groups"), names("transactional_ids")
    trials = Trials(prepared.client(f"{RUN}-{user}", f"password of {user}"), READERS)
    tried = trials.all(topics, groups, ids)
    rules = access_rules(RunConfig(run=RUN), user)
    expected = {trial: may(rules, trial) for trial in tried}
    allowed, refused = sum(tried.values()), len(tried) - sum(tried.values())
    with capsys.disabled():
        print(f"\n{user}: {len(tried)} operations tried, {allowed} allowed, {refused} refused", end=" ")
    assert {trial for trial in tried if tried[trial] != expected[trial]} == set()
    assert refused > 300
    of_others = tuple(f"{run}{end}" for run in NEIGHBOURS for end in "./")
    assert not any(name.startswith(of_others) for (_kind, name, _operation), may in tried.items() if may)


def names(kind: str) -> list[str]:
    """Groups or transactional ids of all roles, of the run and its neighbours."""
    configs = [RunConfig(run=run) for run in (RUN, *NEIGHBOURS)]
    more = {"groups": [], "transactional_ids": ["{run}/exclude", "{run}/redrive"]}[kind]
    templates = [*(template for role in ROLES for template in getattr(role, kind)), *more]
    return [expanded(template, config, number=3) for config in configs for template in templates]


def may(rules: tuple[AccessRule, ...], trial: Trial) -> bool:
    """Whether rules allow an operation, as Kafka documents their meaning."""
    kind, name, operation = trial
    enough = {operation} | IMPLIED.get(operation, set())
    return any(
        rule.resource == kind
        and (rule.name == name or (rule.prefix and name.startswith(rule.name)))
        and enough & set(rule.operations)
        for rule in rules
    )
