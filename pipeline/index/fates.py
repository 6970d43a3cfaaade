"""Fates in the index, stored as small numbers: the fates of the journal, and what steps did with batched rollouts."""

from rollstream.topics.records.fates import BATCHED, CONTROL, DEAD_LETTERED, DROPPED

IN_FLIGHT, UNREAD = "in_flight", "unread"
SETTLED = "settled"
"""Fate of a record that was finished in a part of the journal that was pruned."""
TRAINED, SKIPPED = "trained", "skipped"
NAMES = (UNREAD, IN_FLIGHT, SETTLED, BATCHED, TRAINED, SKIPPED, DROPPED, DEAD_LETTERED, CONTROL)
"""Fates in the order of their numbers."""
CODES = {name: number for number, name in enumerate(NAMES)}
