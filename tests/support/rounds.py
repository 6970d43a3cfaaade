"""How often long tests repeat a fault at a random moment.

FAULT_ROUNDS=4 repeats four times as often: a rare fault then has more chances, and the tests take hours.
"""

import os

_FACTOR = int(os.environ.get("FAULT_ROUNDS", "1"))


def rounds(few: int) -> int:
    """Number of repetitions, of which `few` fit into a run of all tests."""
    return few * _FACTOR
