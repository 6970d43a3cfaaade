"""Fates in the index, stored as small numbers: the fates of the journal, and what steps did with batched rollouts."""

from rollstream.pipeline.tools.run_view import IN_FLIGHT, UNREAD
from rollstream.pipeline.tools.run_view import SETTLED as SETTLED
from rollstream.topics.fates import BATCHED, CONTROL, DEAD_LETTERED, DROPPED

TRAINED, SKIPPED = "trained", "skipped"
NAMES = (UNREAD, IN_FLIGHT, SETTLED, BATCHED, TRAINED, SKIPPED, DROPPED, DEAD_LETTERED, CONTROL)
"""Fates in the order of their numbers."""
CODES = {name: number for number, name in enumerate(NAMES)}
OPEN = CODES[SETTLED]
"""Fates with numbers up to this one may still change when the journal names the record."""
