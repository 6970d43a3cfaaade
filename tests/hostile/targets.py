"""All targets of hostile input that need no broker, by name."""

from tests.hostile import archive_targets, record_targets, request_targets, store_targets
from tests.hostile.flood_targets import by_name

TARGETS = by_name(*record_targets.TARGETS, *store_targets.TARGETS, *archive_targets.TARGETS, *request_targets.TARGETS)
