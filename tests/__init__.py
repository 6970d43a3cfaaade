"""All tests, and the code that they share."""

import contextlib

# Containers run an auditor from these packages without pytest.
with contextlib.suppress(ModuleNotFoundError):
    import pytest

    # Register these packages before anything imports them, so that their failed assertions show the compared values.
    pytest.register_assert_rewrite(
        "tests.containers", "tests.faults", "tests.support", "tests.broker", "tests.simulation"
    )
