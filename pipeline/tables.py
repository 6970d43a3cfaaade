"""Plain tables and figures for people; programs ask for --json."""

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as their widest cell; numbers to the right, text to the left, no trailing blanks."""
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


def bytes_text(size: int) -> str:
    """A size for people: 812 B, 3.4 MB."""
    if size < 1000:
        return f"{size} B"
    power = min((len(str(size)) - 1) // 3, 4)
    return f"{size / 1000**power:.1f} {'kMGT'[power - 1]}B"


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
