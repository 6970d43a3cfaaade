"""Numbers in texts that any program may have written: headers, labels, ids and keys of records."""

_MOST_DIGITS = 18
"""Every such number fits into 64 bits; `int` raises an error for texts of thousands of digits."""


def decimal_number(text: str) -> int | None:
    """Return the number that a text of 1 to 18 ASCII digits names; None for any other text."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS else None
