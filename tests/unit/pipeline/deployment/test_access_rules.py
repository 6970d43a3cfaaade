"""Access rules on the brokers are compared with those that a run needs."""

from dataclasses import replace

import pytest

from rollstream.pipeline.config import RunConfig, load
from rollstream.pipeline.deployment.access_rules import compare, principal, users_of, wanted
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.kafka.access_control import AccessEntry


def stale_rule(principal: str) -> AccessEntry:
    """A rule for a group that no role of run `main` uses."""
    return AccessEntry(principal=principal, resource="group", name="main.earlier", prefix=False, operation="Read")


@pytest.mark.parametrize("role", ["env", "fill"])
def test_rules_of_roles_that_share_a_principal_stay_when_one_of_them_is_compared(role: str) -> None:
    config = load(flags=["topics.principal=User:main"])
    there = wanted(config, (*users_of(config), role))
    stale = stale_rule("User:main")
    plan = compare(config, [role], [*there, stale])
    assert (plan.missing, plan.surplus, plan.others) == ((), (stale,), ())
    assert set(plan.present) == wanted(config, [role])


def test_a_role_with_a_principal_of_its_own_keeps_only_its_rules() -> None:
    config = RunConfig()
    stale = stale_rule("User:main-env")
    of_learner = [replace(rule, principal="User:main-env") for rule in wanted(config, ["learn"])]
    there = {*wanted(config, users_of(config)), *of_learner, stale}
    plan = compare(config, ["env"], there)
    assert set(plan.surplus) == {stale, *of_learner} - wanted(config, ["env"])
    assert (plan.missing, plan.others) == ((), ())


@pytest.mark.parametrize("user", ["prune", "operate"])
@pytest.mark.parametrize("template", ["User:{run}-{role}", "User:{run}"])
def test_rules_that_show_a_group_of_the_user_to_pruning_stay(user: str, template: str) -> None:
    config = load(flags=[f"topics.principal={template}"])
    shown = replace(stale_rule(principal(config, user)), name="main.mytrainer", operation="Describe")
    there = [*wanted(config, users_of(config)), shown]
    for users in (users_of(config), [user]):
        plan = compare(config, users, there)
        assert (plan.missing, plan.surplus, plan.others) == ((), (), (shown,))


def test_rules_of_other_roles_and_further_rights_on_a_group_are_surplus() -> None:
    config = RunConfig()
    stale = {
        replace(stale_rule("User:main-env"), operation="Describe"),
        replace(stale_rule("User:main-prune"), operation="Delete"),
    }
    plan = compare(config, users_of(config), [*wanted(config, users_of(config)), *stale])
    assert (set(plan.surplus), plan.others) == (stale, ())


@pytest.mark.parametrize("template", ["User:{run}-{role}", "User:{run}"])
def test_rules_of_roles_that_were_started_by_themselves_stay(template: str) -> None:
    config = load(flags=[f"topics.principal={template}"])
    of_run, alone = wanted(config, users_of(config)), wanted(config, ["gateway", "eval", "collect"])
    plan = compare(config, users_of(config), of_run | alone)
    assert (plan.missing, plan.surplus) == ((), ())
    # Every user has the rules for the group of readers and for producers' topic, which name nothing of the run.
    assert set(plan.others) == {entry for entry in alone - of_run if entry.name.startswith("main")}
    assert compare(config, ["env"], of_run | alone).surplus == ()


def test_surplus_rules_of_a_role_that_the_run_does_not_have_are_removed_if_it_is_named() -> None:
    config, stale = RunConfig(), stale_rule("User:main-gateway")
    there = {*wanted(config, [*users_of(config), "gateway"]), stale}
    unnamed, named = compare(config, users_of(config), there), compare(config, ["gateway"], there)
    assert (unnamed.surplus, stale in unnamed.others) == ((), True)
    assert (named.surplus, named.others) == ((stale,), ())


def test_rules_for_prefixes_take_the_place_of_rules_for_names_and_back() -> None:
    named = load(flags=["topics.principal=User:main"])
    prefixed = load(flags=["topics.principal=User:main", "topics.prefix_rules=true"])
    by_name, by_prefix = wanted(named, users_of(named)), wanted(prefixed, users_of(prefixed))
    assert len(by_prefix) == 10
    forth = compare(prefixed, users_of(prefixed), by_name)
    assert set(forth.missing) == by_prefix - by_name
    assert set(forth.surplus) == by_name - by_prefix
    back = compare(named, users_of(named), by_prefix)
    assert (set(back.missing), set(back.surplus)) == (by_name - by_prefix, by_prefix - by_name)
    for entry in by_name:
        assert (
            any(
                entry.operation == rule.operation
                and rule.resource == entry.resource
                and entry.name.startswith(rule.name)
                for rule in by_prefix
            )
            or entry.operation == "Describe"
        ), entry


def test_rules_for_prefixes_need_one_principal() -> None:
    with pytest.raises(ConfigurationError, match=r"topics\.prefix_rules .* a user for each role"):
        load(flags=["topics.prefix_rules=true"])
