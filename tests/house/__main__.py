"""Checks every rule and prints each violation as `file:line: what is wrong; the remedy`: `python -m tests.house`."""

import gc
import os
import sys

from tests.house.repository import Repository


def main() -> int:
    """Return 1 if a rule is broken."""
    # Nothing is freed before the end: collecting garbage among millions of nodes takes longer than parsing.
    gc.disable()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from tests.house import documents, imports, privacy

    repository = Repository.read()
    rules = (*imports.RULES, *privacy.RULES, *documents.RULES)
    violations = sorted({violation for rule in rules for violation in rule(repository)})
    print(*violations, *([] if violations else [f"{len(rules)} rules hold in {len(repository.texts)} files"]), sep="\n")
    return int(bool(violations))


if __name__ == "__main__":
    sys.exit(main())
