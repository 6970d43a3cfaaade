"""Memory costs of groups, as grouping.capacity_bytes and grouping.remembered_bytes count them.

The fold drops and forgets groups by these numbers, so they are part of its behaviour: they follow from the records
alone and are the same on every machine. Each cost is slightly higher than what CPython 3.11 uses on 64-bit machines;
tests compare the two.
"""

from collections.abc import Iterable

from rollstream.consumers.grouping.core.groups import GroupKey
from rollstream.consumers.grouping.core.held_rollouts import HeldRollout
from rollstream.topics.wire.rl_examples import REFERENCE

GROUP = 2_000
"""A group without its members: its tables, its deadlines, and its entries in the fold and the batch maker."""
MEMBER = 4_200
"""A rollout without its arrays and names: its record and fields, its offset, and its row in the batch maker."""
TOKEN = 13
"""Token, mask, log-probability, and the advantage once the group is sealed; row_bytes counts the same in a batch."""
REFERENCE_ARRAY = 600
"""Reference log-probabilities, without their bytes in the record and their float32 copy."""
TOKEN_ARRAY = 600
"""A named array of a rollout, without its bytes and its name."""
STAMP = 100
"""Time and weight step of a rollout."""
CANCELLATION = 500
UID = 200
"""A cancelled uid."""
FINISHED_GROUP = 900
"""A finished group."""


def group_cost(key: GroupKey) -> int:
    """Return the cost of a group when it opens."""
    return GROUP + _texts(key.environment, key.example_id, key.group_id)


def member_cost(rollout: HeldRollout) -> int:
    """Return the memory cost of a rollout in a group, once trimmed: its arrays, names and metadata."""
    reference = rollout.token_arrays.get(REFERENCE)
    arrays = rollout.length * TOKEN
    if reference is not None:
        arrays += REFERENCE_ARRAY + len(reference.data) + 4 * rollout.length
    for name, array in rollout.token_arrays.items():
        arrays += TOKEN_ARRAY + _text(name) + len(array.data) + 8 * len(array.shape) if name != REFERENCE else 0
    if rollout.timestamp or rollout.weight_step != -1:
        arrays += STAMP
    names = (rollout.environment, rollout.example_id, rollout.group_id, rollout.episode_uid)
    return MEMBER + arrays + _texts(rollout.uid, rollout.worker_id, *names)


def cancellation_cost(uids: Iterable[str]) -> int:
    """Return the cost of a cancellation that joined a group."""
    return CANCELLATION + sum(UID + _text(uid) for uid in uids)


def finished_group_cost(key: GroupKey) -> int:
    """Return the cost of a finished group while it is remembered."""
    return FINISHED_GROUP + _texts(key.environment, key.example_id, key.group_id)


def _texts(*texts: str) -> int:
    together = "".join(texts)
    return len(together) if together.isascii() else sum(map(_text, texts))


def _text(text: str) -> int:
    return len(text) if text.isascii() else 4 * len(text)
