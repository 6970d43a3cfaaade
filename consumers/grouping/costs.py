"""What groups cost in memory, as grouping.capacity_bytes and grouping.remembered_bytes count it since core version 3.

The fold drops and forgets by these figures, so they are part of its behaviour: they follow from the records alone and
are the same on every machine. Each is a little more than CPython 3.11 on 64 bits takes; tests compare.
"""

from collections.abc import Iterable

from consumers.grouping.groups import GroupKey
from topics.examples import REFERENCE
from topics.records import Rollout

GROUP = 2_000
"""A group without its members: its tables, its deadlines, its place in the fold and with the batch maker."""
MEMBER = 4_200
"""A rollout without its arrays and names: its record and fields, its offset, its row with the batch maker."""
TOKEN = 13
"""Token, mask and log-probability, and the advantage once it is sealed; row_bytes counts the same in a batch."""
REFERENCE_ARRAY = 600
"""Reference log-probabilities, without the bytes they came as and the float32 they become."""
CANCELLATION = 500
UID = 200
"""A uid that was cancelled."""
REMEMBERED = 900
"""A group that is over."""


def of_group(key: GroupKey) -> int:
    """A group when it opens."""
    return GROUP + _texts(key.environment, key.example_id, key.group_id)


def of_member(rollout: Rollout) -> int:
    """A rollout as a group keeps it (`groups.kept`), from its record to its batch."""
    reference = rollout.token_arrays.get(REFERENCE)
    arrays = len(rollout.tokens) * TOKEN
    if reference is not None:
        arrays += REFERENCE_ARRAY + len(reference.data) + 4 * len(rollout.tokens)
    names = (rollout.environment, rollout.example_id, rollout.group_id, rollout.episode_uid)
    return MEMBER + arrays + _texts(rollout.uid, rollout.metadata.worker_id, *names)


def of_cancellation(uids: Iterable[str]) -> int:
    """A cancellation that joined a group."""
    return CANCELLATION + sum(UID + _text(uid) for uid in uids)


def of_remembered(key: GroupKey) -> int:
    """A group that is over, for as long as it is remembered."""
    return REMEMBERED + _texts(key.environment, key.example_id, key.group_id)


def _texts(*texts: str) -> int:
    return sum(map(_text, texts))


def _text(text: str) -> int:
    return len(text) if text.isascii() else 4 * len(text)
