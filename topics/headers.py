"""Headers of a record as they were sent, which may be by anybody: what is no text or no number ends no reader."""

import gc
from operator import methodcaller

from confluent_kafka import Message

from topics.errors import RecordError

_headers = methodcaller("headers")
"""Called so that the interpreter looks at once whether the client left an exception behind beside what it returns."""


def header_pairs(message: Message) -> tuple[tuple[str, bytes | None], ...]:
    """Names and values in their order; a name may come again.

    Raises RecordError where a name is not UTF-8, which the client has no text for.
    """
    try:
        pairs = _headers(message) or []
        # Asked again, the client returns pairs whose first place is empty, and touching that ends the process.
        if any(len(gc.get_referents(pair)) < 2 for pair in pairs):
            raise RecordError(_UNREADABLE)
    except (SystemError, UnicodeDecodeError) as error:
        raise RecordError(_UNREADABLE) from error
    return tuple((name, value.encode() if isinstance(value, str) else value) for name, value in pairs)


_UNREADABLE = "its headers cannot be read: the name of one is not UTF-8"


def header(message: Message, name: str) -> str | None:
    """The last value of a header as text, bytes that are not UTF-8 replaced; None where there is none to be read."""
    try:
        value = dict(header_pairs(message)).get(name)
    except RecordError:
        return None
    return None if value is None else value.decode(errors="replace")
