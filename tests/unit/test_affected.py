"""The tests nearest to a change are found by what they import and by the commands that they name."""

from tests.affected import affected, dependencies

ROLE = "pipeline/roles/label.py"
USER_TEST, UNIT_TEST = "tests/model/test_labeling.py", "tests/unit/topics/wire/test_codec.py"
GRAPH = dependencies(
    [
        ROLE,
        USER_TEST,
        UNIT_TEST,
        "tests/conftest.py",
        "tests/support/runs.py",
        "topics/wire/codec.py",
        "infra/broker/broker.py",
    ]
)


def test_the_nearest_tests_come_first() -> None:
    assert affected({"topics/wire/codec.py"}, GRAPH) == {UNIT_TEST: 1, USER_TEST: 1}
    assert affected({"tests/support/runs.py"}, GRAPH) == {USER_TEST: 1}


def test_a_test_with_a_broker_depends_on_the_roles_that_it_starts() -> None:
    assert affected({ROLE}, GRAPH) == {USER_TEST: 1}


def test_every_test_depends_on_its_conftest_and_not_on_what_fixtures_of_others_import() -> None:
    assert affected({"tests/conftest.py"}, GRAPH).keys() == {UNIT_TEST, USER_TEST}
    assert affected({"infra/broker/broker.py"}, GRAPH) == {}


def test_a_changed_test_is_affected_itself() -> None:
    assert affected({UNIT_TEST}, GRAPH) == {UNIT_TEST: 0}
