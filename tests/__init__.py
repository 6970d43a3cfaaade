"""All tests, and what they share."""

import contextlib

# Containers run an auditor of these packages without pytest.
with contextlib.suppress(ModuleNotFoundError):
    import pytest

    # Before anything imports them: failed assertions in them show the values that they compared.
    pytest.register_assert_rewrite(
        "tests.containers", "tests.faults", "tests.support", "tests.broker", "tests.simulation"
    )
