"""Every rule for the repository's text names what breaks it, with its place and the remedy."""

import ast

import pytest

from tests.house import documents, imports, privacy
from tests.house.repository import Repository

RULES = {rule.__name__: rule for rule in (*imports.RULES, *privacy.RULES, *documents.RULES)}
FENCE = "```"
PLANTED: dict[str, tuple[dict[str, str], str]] = {
    "relative_imports": ({"topics/a.py": "\nfrom . import b\n"}, "topics/a.py:2: imports relatively; write"),
    "folders_by_their_own_names": (
        {"tests/a.py": "def f():\n    import topics.codec\n"},
        "tests/a.py:2: imports topics.codec; import it from rollstream",
    ),
    "direction": (
        {"topics/a.py": "from rollstream.topics import b\nfrom rollstream import producers\n"},
        "topics/a.py:2: topics may not import rollstream.producers; move",
    ),
    "rooms": (
        {"topics/records/a.py": "from rollstream.topics.wire import b\n"},
        "topics/records/a.py:1: records may not import rollstream.topics.wire; move what it needs",
    ),
    "jax": ({"pipeline/a.py": "def f():\n    import jax.numpy\n"}, "pipeline/a.py:2: imports jax.numpy; only"),
    "kafka_client": (
        {"consumers/a.py": "import confluent_kafka\n"},
        "consumers/a.py:1: imports confluent_kafka; use rollstream.topics.kafka",
    ),
    "kafka_messages": ({"consumers/a.py": "message.error()\n"}, "consumers/a.py:1: calls message.error(); take"),
    "weights_without_learner": (
        {"consumers/weights/a.py": "import rollstream.consumers.learner.b\n"},
        "consumers/weights/a.py:1: imports rollstream.consumers.learner.b; weights",
    ),
    "pure_fold": (
        {"consumers/grouping/core/a.py": "from rollstream.consumers.grouping.process import b\n"},
        "consumers/grouping/core/a.py:1: imports rollstream.consumers.grouping.process; the fold",
    ),
    "grouping_seen_by_the_pipeline": (
        {"pipeline/a.py": "from rollstream.consumers.grouping import b\n", "consumers/grouping/b.py": ""},
        "pipeline/a.py:1: imports rollstream.consumers.grouping.b; use",
    ),
    "cycles": (
        {
            "topics/a.py": "x = 1\nfrom rollstream.topics import b\n",
            "topics/b.py": "from rollstream.topics.a import x\n",
        },
        "waits for itself: rollstream.topics.",
    ),
    "public_names": (
        {"docs/a.md": f"{FENCE}python\nfrom rollstream.topics.wire.codec import encode\n"},
        "docs/a.md:2: imports from rollstream.topics.wire.codec; import public names",
    ),
    "private_members": ({"tests/a.py": "import b\nb._y\n"}, "tests/a.py:2: touches _y; show it by a public name"),
    "generated_parts": (
        {"docs/a.md": "x\n<!-- generated: topics -->\nold\n<!-- end -->\n"},
        "docs/a.md:3: a generated table is stale; run: make docs",
    ),
    "fences": ({"docs/a.md": f"{FENCE}sh\nls\n"}, "docs/a.md:1: the block is not closed"),
    "data_blocks": ({"docs/a.md": f"\n{FENCE}toml\na =\n{FENCE}\n"}, "docs/a.md:3: the block is no toml"),
    "links": (
        {"docs/a.md": "# A\n[a](#a) [b](b.md#b) [c](b.md#c)", "docs/b.md": "# B\n"},
        "docs/a.md:2: links to b.md#c, which is not there",
    ),
    "lonely_pages": ({"README.md": "", "docs/a.md": ""}, "docs/a.md:1: no page links here; link it from one"),
    "wide_commands": ({"docs/a.md": f"{FENCE}sh\n{'a' * 81}\n{FENCE}\n"}, "docs/a.md:2: a command of 81 columns"),
    "shell_commands": (
        {"docs/a.md": f"{FENCE}sh\nrollstream ledgr\n{FENCE}\n"},
        "docs/a.md:2: rollstream ledgr: rollstream: rollstream has no command 'ledgr'",
    ),
    "commands_in_prose": (
        {"docs/a.md": "`rollstream ledger --nothing`"},
        "docs/a.md:1: `rollstream ledger --nothing`: there is no --nothing",
    ),
    "python_blocks": (
        {"docs/a.md": f"{FENCE}python\nfrom rollstream import Nothing\n{FENCE}\n"},
        "docs/a.md:2: ModuleNotFoundError",
    ),
    "settings_in_prose": ({"docs/a.md": "`learner.nothing = 1`"}, "docs/a.md:1: no setting is named learner.nothing"),
    "paths_of_a_machine": ({"docs/a.md": "in /home/me\n"}, "docs/a.md:1: names a path below /home/"),
    "numbers_of_decisions": (
        {"docs/decisions/0001-a.md": "", "docs/decisions/0001-b.md": ""},
        "docs/decisions/0001-b.md:1: docs/decisions/0001-a.md has the number 0001 already",
    ),
    "pages_named_in_code": ({"topics/a.py": "# see docs/no.md\n"}, "topics/a.py:1: no page is docs/no.md"),
    "variables_in_code": (
        {"topics/a.py": "x = 'ROLLSTREAM_LEARNER_NAME'\n"},
        "topics/a.py:1: ROLLSTREAM_LEARNER_NAME does not set a setting; did you mean",
    ),
    "tables": (
        {"docs/grouping.md": "\n## Drops\n| reason | a |\n| `late` | b |\n"},
        "docs/grouping.md:2: the table has",
    ),
    "figures_of_losses": (
        {"docs/losses.md": "\n## Which loss\n| `ppo_clip` | clip 0.1 and 0.2 |\n"},
        "docs/losses.md:3: ppo_clip has (clip,",
    ),
    "exit_codes": (
        {"docs/commands.md": "\n## Exit codes\n| code | a |\n", "topics/a.py": "class E:\n    exit_code = 9\n"},
        "topics/a.py:2: docs/commands.md has no exit code 9",
    ),
    "messages": (
        {
            "docs/runbook.md": "## Troubleshooting\n| message | a |\n| `no N brokers` | b |\n",
            "topics/a.py": "x = 'two brokers'\n",
        },
        "docs/runbook.md:3: nothing says: `no N brokers`",
    ),
}


def test_every_rule_has_a_violation_here() -> None:
    assert PLANTED.keys() == RULES.keys()


@pytest.mark.parametrize("rule", PLANTED)
def test_what_breaks_a_rule_is_named_with_its_place_and_the_remedy(rule: str) -> None:
    texts, expected = PLANTED[rule]
    assert any(expected in str(violation) for violation in RULES[rule](Repository(texts)))


@pytest.mark.parametrize("statement", ["import a", "from rollstream.topics import b"])
def test_what_is_for_type_checkers_or_within_a_function_makes_no_cycle(statement: str) -> None:
    texts = {
        "topics/a.py": f"if TYPE_CHECKING:\n    from rollstream.topics import b\ndef f():\n    {statement}\n",
        "topics/b.py": "import rollstream.topics.a\nfrom rollstream.topics import a\n",
    }
    assert [*imports.cycles(Repository(texts))] == []


def test_every_way_to_a_private_name_is_seen() -> None:
    ways = (
        "x._y",
        "from x import _y",
        "patch.setattr(x, '_y', 1)",
        "patch.setattr('a.x._y', 1)",
        "run('import x; x._y')",
    )
    assert [{name for name, _ in privacy.private_names(ast.walk(ast.parse(way)))} for way in ways] == [{"_y"}] * 5
    fine = "self._y, x._replace(a=1), x.__dict__, os._exit(1)"
    assert [*privacy.private_names(ast.walk(ast.parse(fine)))] == []


def test_an_allowance_that_nobody_uses_is_a_violation() -> None:
    violations = [*privacy.private_members(Repository({"tests/support/hanging.py": ""}))]
    assert len(violations) == 2
    assert all(violation.text.startswith("no longer touches _") for violation in violations)
    [gone] = imports.grouping_seen_by_the_pipeline(Repository({"consumers/grouping/config.py": ""}))
    assert "no longer imports rollstream.consumers.grouping.config" in gone.text


def test_a_table_that_nobody_generates_is_an_error() -> None:
    with pytest.raises(KeyError):
        [*documents.generated_parts(Repository({"docs/a.md": "<!-- generated: nothing -->\n<!-- end -->"}))]
