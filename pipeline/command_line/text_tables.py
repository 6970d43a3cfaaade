"""Plain text tables for people; programs use --json."""

import shlex
import sys
import unicodedata
from collections.abc import Sequence
from datetime import UTC, datetime


def printable(text: str, keep: str = "\n\t") -> str:
    """Escape characters that would affect a terminal, except those in `keep`.

    Control, direction and invisible characters become e.g. \\u001b, and above U+FFFF two such escapes, as in JSON.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c in keep or unicodedata.category(c) not in _UNSEEN else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


_UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format columns as wide as their widest cell, numbers to the right, text to the left, without trailing blanks."""
    cells = [[str(cell) for cell in header], *([_cell(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    numeric = [
        bool(rows) and all(isinstance(row[i], int | float) and not isinstance(row[i], bool) for row in rows)
        for i in range(len(header))
    ]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in cells
    )


def clipped(text: str, width: int) -> str:
    """Shorten a text to a column's width on a terminal; keep it whole if standard output is not a terminal."""
    return text if len(text) <= width or not sys.stdout.isatty() else f"{text[: width - 1]}…"


def command_text(command: str, indent: str = "  ", width: int = 80) -> str:
    """Format a shell command on lines that fit a terminal and work when copied."""
    words = [shlex.quote(word) for word in shlex.split(command)]
    lines, line = [], indent + words[0]
    for word in words[1:]:
        if len(line) + len(word) + 3 > width:
            lines.append(f"{line} \\")
            line = f"{indent}    {word}"
        else:
            line += f" {word}"
    return "\n".join([*lines, line])


def bytes_text(size: int) -> str:
    """Format a size: 812 B, 3.4 MB."""
    if size < 1000:
        return f"{size} B"
    power = min((len(str(size)) - 1) // 3, 4)
    return f"{size / 1000**power:.1f} {'kMGT'[power - 1]}B"


def utc_time(seconds: float) -> str:
    """Format a time since the Unix epoch: 2026-11-30 08:00:00 UTC."""
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S UTC}"
    except (OverflowError, OSError, ValueError):  # a clock far off, or a damaged record
        return "unknown"


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:z.3f}" if isinstance(value, float) else printable(str(value), keep="")
