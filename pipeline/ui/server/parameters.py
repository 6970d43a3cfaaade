"""Parameters of requests as typed values. An unusable parameter raises an error with a remedy."""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from rollstream.pipeline.index.indexed_run import RolloutPlace
from rollstream.pipeline.ui.server.answers import UnusableParameter
from rollstream.topics.errors import ConfigurationError

T = TypeVar("T")
LIMIT, MOST = 100, 1000
"""Number of rows of a page: default and maximum."""
_LARGEST = 1 << 63
_DIGITS = 19


def integer(query: Mapping[str, str], name: str) -> int | None:
    """Return a parameter as a whole number; None if it is not given."""
    text = query.get(name, "")
    if not text:
        return None
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal()) or len(digits) > _DIGITS or abs(int(text)) >= _LARGEST:
        raise UnusableParameter(f"{name} is {text[:40]!r}, not a whole number", f"give {name} as digits, or omit it")
    return int(text)


def number(query: Mapping[str, str], name: str) -> float | None:
    """Return a parameter as a finite number; None if it is not given."""
    text = query.get(name, "")
    try:
        value = float(text) if text else None
    except ValueError:
        value = math.nan
    if value is not None and not math.isfinite(value):
        raise UnusableParameter(f"{name} is {text[:40]!r}, not a number", f"give {name} as a number such as 0.5")
    return value


def text(query: Mapping[str, str], name: str) -> str | None:
    """Return a parameter as text; None if it is empty or not given."""
    return query.get(name) or None


def choice(query: Mapping[str, str], name: str, choices: Sequence[str]) -> str:
    """Return a parameter that must be one of `choices`; the first choice if it is not given."""
    word = query.get(name) or choices[0]
    if word not in choices:
        raise UnusableParameter(f"{name} is {word[:40]!r}", f"{name} must be one of {', '.join(choices)}")
    return word


def flag(query: Mapping[str, str], name: str) -> bool | None:
    """Return a parameter as true or false; None if it is not given."""
    word = query.get(name, "")
    if not word:
        return None
    return choice(query, name, ("true", "1", "false", "0")) in ("true", "1")


def within(query: Mapping[str, str], name: str, default: int, most: int, *, least: int = 1) -> int:
    """Return a parameter as a count from `least` to `most`; a larger count becomes `most`."""
    value = integer(query, name)
    if value is not None and value < least:
        raise UnusableParameter(f"{name} is {value}", f"{name} must be at least {least}")
    return default if value is None else min(value, most)


def place(partition: str, offset: str) -> RolloutPlace:
    """Return the place of a record, from two parts of a path."""
    parts = {"partition": partition, "offset": offset}
    numbers = integer(parts, "partition"), integer(parts, "offset")
    if numbers[0] is None or numbers[1] is None or min(numbers[0], numbers[1]) < 0:
        raise UnusableParameter(f"{partition[:20]}/{offset[:20]} is not a place", "give PARTITION/OFFSET, e.g. 0/1234")
    return RolloutPlace(numbers[0], numbers[1])


def page_of(
    rows: Sequence[T], names: Sequence[str], query: Mapping[str, str], place: Callable[[str], Any] | None = None
) -> tuple[Sequence[T], str | None]:
    """Return at most `limit` rows after the row that `after` names, and the last row's name if more rows follow.

    Rows are in the order of `place(name)`, which also has a place for a row that has left the list since; without it,
    `after` must name a row of the list. `place` raises KeyError or ConfigurationError for the name of no row.
    """
    after, begin = text(query, "after"), 0
    if after is not None:
        place = place or {name: number for number, name in enumerate(names)}.__getitem__
        try:
            begin = bisect_right(names, place(after), key=place)
        except (KeyError, ConfigurationError):
            raise UnusableParameter(
                f"after is {after[:40]!r}, which is not in the list", "ask again without after"
            ) from None
    end = begin + within(query, "limit", LIMIT, MOST)
    return rows[begin:end], names[end - 1] if end < len(rows) else None
