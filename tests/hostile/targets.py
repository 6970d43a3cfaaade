"""All targets of hostile input that need no broker, by name."""

from pathlib import Path

from tests.hostile import archive_targets, record_targets, request_targets, store_targets
from tests.hostile.flood_targets import Outcome, by_name, flood

TARGETS = by_name(*record_targets.TARGETS, *store_targets.TARGETS, *archive_targets.TARGETS, *request_targets.TARGETS)


def flood_by_name(name: str, inputs: int, seed: int, folder: Path) -> Outcome:
    """Give a target so many inputs of one seed. It lies here because a started process cannot import `__main__`."""
    return flood(TARGETS[name], inputs, seed, folder)
