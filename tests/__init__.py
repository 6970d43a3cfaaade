"""All tests, and what they share."""

import pytest

# Before anything imports them: what their assertions compared is told, as it is for those in tests.
pytest.register_assert_rewrite("tests.faults", "tests.support", "tests.broker", "tests.simulation")
